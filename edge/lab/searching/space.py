"""The candidates of a search: models × weight types × KV settings × threads, planned and predicted for a device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NoReturn

from edge.apps.planning import APP_SYSTEMS, check_settings
from edge.backends.llamacpp.library import is_installed
from edge.budget import format_bytes, format_joules
from edge.converters.calibrate import any_importance, check_walk
from edge.converters.gguf.ggml import needs_importance, quantize_file
from edge.converters.gguf.outcome import has_choice
from edge.converters.gguf.plain import fields_as
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import BudgetError, InputError, UnsupportedError
from edge.formats.blocks import PLAIN
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import write_outline
from edge.lab.prediction.forecast import Outlook, look_ahead
from edge.lab.prediction.predict import Guess, Sustained
from edge.lab.quality.matrix import Cell, make_cells
from edge.model.model import Model
from edge.model.reader import read_spec
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_tensors
from edge.options import Options
from edge.plan.candidates import EVICTED_SHARE
from edge.storage.fingerprint import fingerprint

TYPES = ("Q8_0", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K")  # without llama.cpp, only the plain ones
POLICIES = ("streaming", "h2o")  # the simplest policy, and one that uses attention; exported apps have both
KV_DTYPES = ("f16", "int8", "int4")
_SHARES = (2, 4)  # caches with rows for 1/2 and 1/4 of the tokens, for policies that evict
_GRAIN = 16  # rows: cache sizes are multiples of this
_PLENTY = 1 << 40  # bytes, for a device whose profile states no memory
_MEMORY = "more memory than there is, or weights that would be streamed from the disk"
_ENERGY = "more joules than the energy budget"


@dataclass(frozen=True)
class Weights:
    """A model in one type."""

    model: str  # as the user named it
    path: str  # of the file itself, or of the file to convert
    sha256: str  # of that file
    type: str | None  # None: as in the file
    by_importance: bool  # rounded with an importance matrix of edge's own text
    label: str
    nbytes: int


@dataclass(frozen=True)
class Candidate:
    """Settings that fit, with their predicted figures."""

    weights: Weights
    cell: Cell  # rows of the full cache: as many as there are tokens
    rows: int
    threads: int
    backend: str
    memory: int  # predicted peak of the process, bytes
    tok_s: Guess | None  # in the middle of the answer
    joules: Guess | None  # of such a token
    spent: float | None  # joules of prompt and answer
    sustained: Sustained | None = None  # used for ranking where the device throttles

    @property
    def kept_speed(self) -> float:
        """The share of its speed that remains at the end of a long run."""
        return self.sustained.tok_s.value / self.tok_s.value if self.sustained and self.tok_s else 1.0

    @property
    def kept_joules(self) -> float:
        """Joules per token at the end of a long run / at its beginning."""
        lasting = self.sustained.joules if self.sustained else None
        return lasting.value / self.joules.value if lasting and self.joules else 1.0


@dataclass(frozen=True)
class Space:
    """The dimensions of a search."""

    tokens: int  # of prompt and answer together; the prompt has half of them
    types: tuple[str, ...] | None = None  # of FTYPES; None: those of TYPES that make the file smaller
    policies: tuple[str, ...] = POLICIES
    kv_dtypes: tuple[str, ...] = KV_DTYPES

    @property
    def prompt(self) -> int:
        return max(1, self.tokens // 2)

    def cells(self) -> list[Cell]:
        """The KV settings, those with a full cache first. Raises InputError for unknown policies."""
        rows = [max(_GRAIN, self.tokens // share // _GRAIN * _GRAIN) for share in _SHARES]
        return make_cells(self.policies, self.kv_dtypes, [each for each in rows if each < self.tokens], in_rows=True)


@dataclass(frozen=True)
class Planned:
    """All candidates that fit, and why the others do not."""

    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[str, int], ...]  # reasons, each with its number of weights × KV settings
    basis: tuple[str, ...]  # the device's figures that predictions rest on


def weights_of(model: Model, name: str, space: Space, folder: Path) -> Iterator[tuple[Weights, GGUFFile]]:
    """The model itself, then in other types, as headers in `folder`, without weights. Leaves out types that do not make
    it smaller, or equal an earlier one. Raises InputError, MissingExtraError."""
    file, sha256 = model.file, fingerprint(model.file.path).sha256
    size = sum(tensor.nbytes for tensor in file.tensors.values())
    path = str(file.path.absolute())
    yield Weights(name, path, sha256, None, False, model.spec.label, size), file
    known = set[tuple[tuple[str, str], ...]]()
    for kind in _types(space):
        by_importance = _uses_importance(model, kind) and is_installed()
        importance = any_importance(file.tensors) if by_importance else None
        planned = quantize_file(file, folder / "none.gguf", kind, dry_run=True, importance=importance)
        smaller, types = sum(each.nbytes for each in planned), tuple((each.name, each.type) for each in planned)
        if smaller < size and types not in known:
            known.add(types)
            outline = write_outline(folder / f"{sha256[:16]}-{kind}.gguf", fields_as(file, kind), planned)
            label = f"{model.spec.label} → {kind}"
            yield Weights(name, path, sha256, kind, by_importance, label, smaller), outline


def _uses_importance(model: Model, kind: str) -> bool:
    """Whether an importance matrix, which needs a network that edge can run, makes a difference to a type. Raises
    UnsupportedError if the type requires one and edge cannot run the model."""
    try:
        check_walk(model.spec)
        find_tensors(model.file, model.spec)
    except UnsupportedError:
        if needs_importance(kind):
            raise
        return False
    return has_choice(model.file, kind)


def _types(space: Space) -> list[str]:
    if space.types is not None:
        return [*space.types]
    return [each for each in TYPES if each in PLAIN or is_installed()]


def plan_all(
    weights: Sequence[tuple[Weights, GGUFFile]], space: Space, profile: DeviceProfile, options: Options
) -> Planned:
    """Plan and predict every candidate. Raises BudgetError, which names the smallest sufficient budget, if none fits;
    InputError or UnsupportedError if none can run."""
    found: list[Candidate] = []
    plans: list[Outlook] = []
    refused = Counter[str]()
    needs: list[int] = []
    for (each, file), cell in product(weights, space.cells()):
        spec = read_spec(file)
        try:
            first, outlook = _plan(each, file, spec, cell, space, profile, options)
            plans.append(outlook)
            found.append(first)
            for threads in sorted({1, first.threads // 2} - {0, first.threads}):
                fewer = replace(options, threads=threads)
                found.append(_plan(each, file, spec, cell, space, profile, fewer)[0])
        except BudgetError:
            refused[_MEMORY] += 1
            with suppress(BudgetError):
                needs.append(_need(file, spec, cell, space, profile, options))
        except (InputError, UnsupportedError) as error:
            refused[str(error)] += 1
    if not found:
        _refuse(needs, refused, profile, options)
    # One size for all: this process, which represents that of a run, grows while it plans.
    own = min(each.plan.bytes.interpreter for each in plans)
    found = [replace(each, memory=each.memory + own) for each in found]
    fitting = [each for each in found if options.energy is None or (each.spent or math.inf) <= options.energy]
    if not fitting:
        least = min(each.spent or math.inf for each in found)
        if least == math.inf:
            raise InputError(f"nothing predicts the joules of {profile.name}: leave --energy out")
        raise BudgetError(
            f"no candidate answers within {format_joules(options.energy or 0.0)}: {space.prompt} tokens of prompt and "
            f"{space.tokens - space.prompt} of answer take {format_joules(least)} at least (estimated): state "
            f"--energy {_rounded_up(least):g}J or more, or fewer --tokens"
        )
    before, after = ({(each.weights, each.cell) for each in some} for some in (found, fitting))
    refused[_ENERGY] += len(before - after)
    return Planned(tuple(fitting), tuple((+refused).items()), plans[0].prediction.basis)


def _plan(
    weights: Weights, file: GGUFFile, spec: ModelSpec, cell: Cell, space: Space, profile: DeviceProfile,
    options: Options,
) -> tuple[Candidate, Outlook]:  # fmt: skip
    """The candidate, whose memory excludes the interpreter's, and its outlook.

    Raises BudgetError, also if weights would be streamed: such settings are a last resort; UnsupportedError and
    InputError for settings that an app on the device cannot have.
    """
    wanted, rows = _with_cell(options, cell, space)
    if profile.system in APP_SYSTEMS:
        check_settings(wanted)
    middle = min(rows, space.prompt + (space.tokens - space.prompt) // 2)
    found = look_ahead(file, spec, profile, wanted, prompt=space.prompt, contexts=[middle], history=False)
    if found.plan.config.resident:
        raise BudgetError("weights would be streamed")
    decode = next(iter(found.prediction.decode), None)
    tok_s, joules = (decode.tok_s, decode.joules) if decode else (None, None)
    prompt = found.prediction.prompt_joules
    spent = prompt.value + (space.tokens - space.prompt) * joules.value if joules and prompt else None
    plan, config = found.plan, found.plan.config
    memory = plan.bytes.total - plan.bytes.interpreter
    candidate = Candidate(
        weights, cell, config.capacity, config.threads, plan.backend, memory, tok_s, joules, spent,
        decode.sustained if decode else None,
    )  # fmt: skip
    return candidate, found


def _with_cell(options: Options, cell: Cell, space: Space) -> tuple[Options, int]:
    rows = cell.max_kv_size or space.tokens
    return replace(
        options, kv_policy=cell.policy, kv_dtype=cell.kv_dtype, max_kv_size=rows, expected_tokens=space.tokens
    ), rows  # fmt: skip


def _need(file: GGUFFile, spec: ModelSpec, cell: Cell, space: Space, profile: DeviceProfile, options: Options) -> int:
    """The smallest budget, in bytes, that keeps all weights in memory, with the shortest chunks. Raises BudgetError."""
    memory = None if profile.memory else _PLENTY
    wanted, _ = _with_cell(replace(options, memory=memory, prefill_step_size=_GRAIN // EVICTED_SHARE), cell, space)
    plan = look_ahead(file, spec, profile, wanted, prompt=space.prompt, contexts=[1], history=False).plan
    if plan.config.resident:
        raise BudgetError("the device's memory is too small")
    return plan.bytes.total + plan.bytes.reserve


def _refuse(needs: Sequence[int], refused: Counter[str], profile: DeviceProfile, options: Options) -> NoReturn:
    if needs and options.memory is not None:
        least = -(-min(needs) >> 20) << 20
        raise BudgetError(
            f"no candidate fits {format_bytes(options.memory)} with all weights in memory: the smallest that fits is "
            f"--memory {least >> 20}MiB",
            smallest=least,
        )
    if refused[_MEMORY]:
        raise BudgetError(
            f"no candidate fits the memory of {profile.name} with all weights in it: take a smaller model, or fewer "
            "--tokens"
        )
    raise InputError(f"no candidate can run: {'; '.join(refused)}")


def _rounded_up(joules: float) -> float:
    """Round up to two significant digits."""
    step = 10.0 ** (math.floor(math.log10(joules)) - 1)
    return math.ceil(joules / step) * step
