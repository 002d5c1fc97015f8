"""`edge models --fits`: the known small models that fit a device and a budget, with their predicted speed.

For every model of the table (model/names/models.toml) and every quantization mixture of its files, a header like
the file's is written, read and planned like any other; nothing is downloaded. All figures are estimates.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge.backends import engine_named
from edge.budget import format_bytes
from edge.devices.logs import only_from
from edge.devices.memory import memory_limit
from edge.devices.output import work_folder
from edge.devices.power import memory_root
from edge.devices.profiles import HOST, find_profile
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import BudgetError, InputError, MissingExtraError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.lab.prediction.forecast import Outlook, look_ahead
from edge.lab.prediction.predict import Guess, Sustained
from edge.model.names.known import KnownModel, known_models, outline_model
from edge.model.reader import read_spec
from edge.model.structure.spec import ModelSpec
from edge.options import AUTO, Options, takes_options

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Python 3.10 has none

    from edge.keywords import Keywords

READABLE = 5.0  # tokens per second: 238 words a minute (silent reading, Brysbaert 2019), at 1.3 tokens a word
TOKENS = 4096  # of prompt and answer together
_CONTEXT = 512  # rows in the cache when decoding is predicted


@dataclass(frozen=True)
class Try:
    """The plan of one mixture of a model."""

    type: str
    weights: int  # bytes of the file's tensors
    memory: int | None = None  # predicted peak of the process, bytes
    on_disk: int = 0  # bytes of a table that stays in the file: a token reads a row
    streamed: int = 0  # bytes of weights that every token reads from the disk, because not all fit
    rows: int | None = None
    kv_dtype: str | None = None
    engine: str | None = None
    prompt_tok_s: Guess | None = None
    tok_s: Guess | None = None
    joules: Guess | None = None  # of a token
    sustained: Sustained | None = None  # speed and joules that rank, where the device throttles
    energy_tokens: Guess | None = None
    unknown: tuple[str, ...] = ()  # figures that are not predicted, and why
    reason: str | None = None  # why it does not fit
    needs: int | None = None  # smallest sufficient budget in bytes, if known

    @property
    def fits(self) -> bool:
        return self.reason is None

    @property
    def ranking_tok_s(self) -> Guess | None:
        return self.sustained.tok_s if self.sustained else self.tok_s

    @property
    def is_good(self) -> bool:
        """Whether it fits in memory without streaming, at a readable or unknown speed."""
        speed = self.ranking_tok_s
        return self.fits and not self.streamed and (speed is None or speed.value >= READABLE)


@dataclass(frozen=True)
class Fit:
    """A model of the table, judged."""

    name: str
    repository: str
    licence: str
    parameters: int  # counted
    context: int
    best: Try | None  # best mixture that fits, at a readable speed if possible; None: none fits
    reason: str | None  # why a better mixture, or any, does not fit
    why: str | None  # the reason in a few words
    tried: tuple[Try, ...]  # mixtures, best first, up to a good one


@takes_options
def fits(
    options: Options | None = None,
    *,
    device: str = HOST,
    names: Sequence[str] | None = None,
    progress: Callable[[float, float], None] = lambda done, total: None,
    **keywords: Unpack[Keywords],
) -> list[Fit]:
    """Judge the models of the table and sort them, best first: those that fit and reach `READABLE`, by parameters, then
    by speed; those of unknown speed; slower ones; those that fit only with streamed weights; those that do not fit.

    device: its name in `edge devices list`. names: judge these models only. progress: called with the number of models
    judged, and of all. expected_tokens: 4,096 unless stated. The keywords are options, as people write them, and take
    precedence over `options`:

    OPTIONS

    Raises InputError for impossible options, unknown devices and names.
    """
    options = Options.of(options, **keywords)
    options = options if options.expected_tokens else options.updated(expected_tokens=TOKENS)
    profile, table = find_profile(device), known_models()
    if unknown := sorted(set(names or ()) - set(table)):
        raise InputError(f"{unknown[0]!r} is not in the table of models: choose {', '.join(table)}")
    if options.provider is not None and profile.name == HOST:
        from edge.backends.onnx.providers import find_provider

        find_provider(options.provider)  # refuses an unknown one, as a run does
    chosen = [model for name, model in table.items() if names is None or name in names]
    found: list[Fit] = []
    # Hide warnings about engines that do not run a model: the table shows the one that does.
    with work_folder() as folder, only_from(logging.ERROR, "edge"):
        for model in chosen:
            progress(len(found), len(chosen))
            outline = folder / f"{model.name.replace(':', '-')}.gguf"
            found.append(_judge(model, profile, options, outline))
    progress(len(chosen), len(chosen))
    return sorted(found, key=_order)


def _judge(model: KnownModel, profile: DeviceProfile, options: Options, path: Path) -> Fit:
    """Try mixtures from the best on, until one fits in memory and is fast enough."""
    tried: list[Try] = []
    parameters = 0
    for mixture in model.types:
        file = outline_model(model, mixture, path)
        parameters = sum(tensor.elements for tensor in file.tensors.values())
        tried.append(_plan(model, mixture, file, profile, options))
        if tried[-1].is_good:
            break
    best = _best(tried)
    better = tried[: tried.index(best)] if best and not best.streamed else tried
    return Fit(
        name=model.name,
        repository=model.repository,
        licence=model.licence,
        parameters=parameters,
        context=model.figures["context_length"],
        best=best,
        reason=_why(better[-1], best) if better else None,
        why=_why(better[-1], best, short=True) if better else None,
        tried=tuple(tried),
    )


def _plan(model: KnownModel, mixture: str, file: GGUFFile, profile: DeviceProfile, options: Options) -> Try:
    weights = sum(tensor.nbytes for tensor in file.tensors.values())
    try:
        spec = read_spec(file)
        # llama.cpp must try such a header, which takes a second, and needs all weights in memory.
        if not spec.proven and _runs_on_llamacpp(file, spec, profile, options):
            room = _room(profile, options)
            if room is not None and weights > room:
                reason = f"its {mixture} weights take {format_bytes(weights)} of {format_bytes(room)}"
                return Try(mixture, weights, reason=reason)
            file = outline_model(model, mixture, file.path, loadable=True)
        expected = min(options.expected_tokens or TOKENS, spec.context)
        found = look_ahead(file, spec, profile, replace(options, expected_tokens=expected), outline=True)
        return _try(mixture, weights, found)
    except (BudgetError, UnsupportedError, MissingExtraError) as error:
        needs = error.smallest if isinstance(error, BudgetError) else None
        return Try(mixture, weights, reason=str(error).removeprefix(f"{file.path}: "), needs=needs)


def _runs_on_llamacpp(file: GGUFFile, spec: ModelSpec, profile: DeviceProfile, options: Options) -> bool:
    """Whether llama.cpp would run a model whose header only its engine can check."""
    if options.backend != AUTO or options.provider:
        return spec.network is None or options.backend == "llamacpp"
    try:
        engine_named("cpu").check_elsewhere(file, spec, profile.system)
    except UnsupportedError:
        return True
    return False


def _room(profile: DeviceProfile, options: Options) -> int | None:
    """Bytes that a process may hold on that device; None if unknown."""
    if profile.name != HOST:
        return options.memory or profile.memory
    return min(memory_limit(memory_root()).bytes, options.memory or sys.maxsize)


def _try(mixture: str, weights: int, found: Outlook) -> Try:
    plan, prediction = found.plan, found.prediction
    below = [each for each in prediction.decode if each.context <= _CONTEXT]
    point = next(iter([*reversed(below), *prediction.decode]), None)  # compiled graphs have a single context
    return Try(
        type=mixture,
        weights=weights,
        memory=plan.predicted_peak,
        on_disk=plan.bytes.on_disk,
        streamed=plan.bytes.streamed,
        rows=plan.config.capacity,
        kv_dtype=plan.config.kv_dtype,
        engine=plan.backend,
        prompt_tok_s=prediction.prefill_tok_s,
        tok_s=point.tok_s if point else None,
        joules=point.joules if point else None,
        sustained=point.sustained if point else None,
        energy_tokens=prediction.energy_tokens,
        unknown=prediction.unknown,
    )


def _best(tried: list[Try]) -> Try | None:
    """The best mixture that fits in memory, at a readable or unknown speed; else the fastest that fits; else the one
    that reads least from the disk."""
    fitting = [each for each in tried if each.fits]
    whole = [each for each in fitting if not each.streamed]
    if not whole:
        return min(fitting, key=lambda each: each.streamed, default=None)
    good = [each for each in whole if each.is_good]
    return good[0] if good else max(whole, key=_speed)


def _why(other: Try, best: Try | None, *, short: bool = False) -> str:
    """Why the next better mixture is not taken; if none fits in memory, why even the smallest does not."""
    if best and best.streamed:
        return f"not all weights fit: {format_bytes(best.streamed)} are read from the disk for every token"
    if short and other.needs:
        streamed = ", with weights streamed" if other.needs < other.weights else ""
        return f"{other.type} needs {other.needs >> 20} MiB{streamed}"
    if best is None:
        return other.reason or ""
    if other.streamed:
        return f"{other.type} would read {format_bytes(other.streamed)} of weights from the disk for every token"
    slow = f"{other.type} is slower than {READABLE:g} tok/s: {_speed(other):.2g}" if other.tok_s else other.type
    return f"{other.type}: {other.reason}" if other.reason else slow


def _speed(each: Try) -> float:
    return each.ranking_tok_s.value if each.ranking_tok_s else 0.0


def _order(fit: Fit) -> tuple[float, ...]:
    best = fit.best
    if best is None:
        return (4, fit.parameters)  # the smallest first
    speed = _speed(best)
    if best.streamed:
        return (3, best.streamed)
    return (1 if best.tok_s is None else 0 if speed >= READABLE else 2, -fit.parameters, -speed)
