"""The search: predict all candidates, then measure until every setting on the front has been measured.

Plans predict speed, joules and bytes. Losses are first measured separately: of each weight type, KV dtype and KV policy
alone. Their sums estimate the losses of all candidates. The candidates on the front are then measured jointly, which
moves the front, until no loss on it is an estimate. Their speed and joules are measured last, on this device, or on the
machine that `on` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge.backends import find_backend
from edge.backends.tvm import ENGINE as CPU
from edge.converters.gguf.ggml import find_ftype
from edge.converters.held_out import TEXT
from edge.devices.output import work_folder
from edge.devices.probe import probe_profile
from edge.devices.profiles import HOST, find_profile
from edge.errors import InputError, UnsupportedError
from edge.lab.quality.material import checksum_of
from edge.lab.quality.matrix import FULL, Cell
from edge.lab.searching.command import command_of
from edge.lab.searching.elsewhere import Machine, find_machine
from edge.lab.searching.front import front
from edge.lab.searching.space import KV_DTYPES, POLICIES, Candidate, Space, Weights, plan_all, weights_of
from edge.lab.searching.trials import Outcome, Quality, Runner, Speed, Trial, full_dtype, recall, remember, run_here
from edge.model.model import Model
from edge.options import AUTO, Options, takes_options
from edge.plan.checks import check_engine
from edge.plan.kv_losses import KVLoss, remember_losses
from edge.run.starting.opening import open_model
from edge.types import IntArray

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Python 3.10 has none

    from edge.keywords import Keywords

SCHEMA = 1
_TOKENS = 1024  # by default, at most
_LEAST_TOKENS = 64
SAME_KL = 1e-3  # nats: smaller losses count as this, since a text of this length cannot distinguish them
_PROBE_S = 4.0

OnProgress = Callable[[str, int, int], None]
"""Called with the trial in progress, the number of finished trials, and the number of trials known to be needed."""


@dataclass(frozen=True)
class Point:
    """A setting on the front. Its candidate's figures are predicted."""

    candidate: Candidate
    quality: Quality  # measured on the search's text, with all settings jointly
    speed: Speed | None  # measured on the device; None: only predicted
    command: str  # for a shell

    @property
    def tok_s(self) -> float | None:
        """Tokens per second, measured, else predicted; before the device throttles."""
        if self.speed:
            return self.speed.tok_s
        return self.candidate.tok_s.value if self.candidate.tok_s else None

    @property
    def joules(self) -> float | None:
        """Joules per token, likewise."""
        if self.speed:
            return self.speed.joules or None  # some counters tick rarely
        return self.candidate.joules.value if self.candidate.joules else None

    @property
    def ranking_tok_s(self) -> float | None:
        """Tokens per second; at the end of a long run if the device throttles."""
        return None if self.tok_s is None else self.tok_s * self.candidate.kept_speed

    @property
    def ranking_joules(self) -> float | None:
        return None if self.joules is None else self.joules * self.candidate.kept_joules


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    device: str
    on: str | None  # the machine that measured speed and joules; None: this one, or none
    points: tuple[Point, ...]  # the front, the smallest loss first
    reference: str  # the weights and full cache against which losses are measured
    text: str  # its name
    text_crc32: int
    tokens: int  # of the text, and of prompt and answer
    fitting: int  # candidates
    refused: tuple[tuple[str, int], ...]  # why others do not fit, and how many
    basis: tuple[str, ...]  # the device's figures that predictions rest on
    measured: int  # trials of this run
    remembered: int  # trials of earlier runs
    failed: tuple[tuple[str, str], ...]  # trials without a result, and why
    unpredicted: tuple[str, ...]  # goals without predictions, which did not count
    trial_peak: int  # the largest peak of all trials' processes, bytes


@takes_options
def search(
    models: str | Path | Sequence[str | Path],
    options: Options | None = None,
    *,
    device: str = HOST,
    types: Sequence[str] | None = None,
    policies: Sequence[str] = POLICIES,
    kv_dtypes: Sequence[str] | None = None,
    text: str | Path | None = None,
    tokens: int | None = None,
    scheduler: str | None = None,
    on: str | None = None,
    on_progress: OnProgress = lambda label, done, total: None,
    **keywords: Unpack[Keywords],
) -> Found:
    """Find the settings of models that no other surpasses in loss, speed, joules and memory.

    models: GGUF files or installed names, of the same tokens; losses are measured against the largest. device: its name
    in `edge devices list`. types: as llama-quantize names them (default: usual ones that are smaller than the file).
    text: what losses are measured on, or a file of it (default: prose, code and lists that come with edge). tokens: of
    prompt and answer together, and of the text (default: those of the text, at most 1,024). scheduler: the address of a
    Dask scheduler, whose workers measure losses. on: where the device is, as ssh:user@host[:port] or adb[:serial]: kits
    measure the front's speed and joules there, with the cpu engine. energy: joules that prompt and answer may take.
    on_progress: told the trial, how many are done, and of how many. The keywords are options, as people write them, and
    take precedence over `options`:

    OPTIONS

    Raises BudgetError if nothing fits, InputError for unknown devices and types, texts that are too short, models of
    different tokens and schedulers that cannot be reached, UnsupportedError for encoders and models in ONNX,
    MissingExtraError without `distributed`, EngineError for a device that cannot be reached.
    """
    options = Options.of(options, **keywords)
    profile = find_profile(device)
    kinds = None if types is None else tuple(map(find_ftype, types))
    machine = None
    if on is not None:
        if profile.name == HOST:
            raise InputError(f"--on {on} is another machine: name its --device, which predicts its speed")
        if options.backend not in (AUTO, CPU.NAME):
            raise InputError(f"--backend {options.backend}: other machines are measured with the cpu engine, in a kit")
        options = replace(options, backend=CPU.NAME)
        machine = find_machine(on, profile, options.memory)
    named = [models] if isinstance(models, str | Path) else list(models)
    if not named or (kv_dtypes is not None and not kv_dtypes):
        raise InputError(f"no {'KV dtype' if named else 'model'} is named: name one at least")
    opened = [(str(name), _open(name)) for name in dict.fromkeys(named)]
    name, base = max(opened, key=lambda each: (each[1].spec.parameters, each[1].spec.weight_bytes))
    text_name, content = _read(text)
    ids = _tokens(opened, content, tokens)
    backend = find_backend(options.backend, base.file, base.spec)
    has = backend.CAPABILITIES.kv_dtypes
    dtypes = [each for each in KV_DTYPES if each in has] or has[:1] if kv_dtypes is None else kv_dtypes
    for each in dtypes:
        check_engine(backend, each, None)
    space = Space(ids.size, kinds, tuple(policies), tuple(dtypes))
    space.cells()  # checks them
    with cluster_of(scheduler) as runner, work_folder() as folder:
        if profile.name == HOST and profile.bandwidth(1) is None:
            on_progress("this device's memory and arithmetic", 0, 1)
            profile = probe_profile(_PROBE_S)
        weights = [each for model_name, model in opened for each in weights_of(model, model_name, space, folder)]
        if len(opened) > 1:  # several models may have the same label
            weights = [(replace(each, label=f"{each.model}: {each.label}"), file) for each, file in weights]
        planned = plan_all(weights, space, profile, options)
        reference = next(each for each, _ in weights if each.model == name and each.type is None)
        cell = Cell(FULL, space.kv_dtypes[0])
        trial = Trial("quality", reference, reference, cell, tuple(ids.tolist()), backend.NAME)
        search = _Search(trial, runner, on_progress)
        search.measure_alone(planned.candidates, (each for each, _ in weights))
        if full_dtype(backend.NAME) == has[0]:
            remember_losses(base.file, backend, search.kv_losses(reference))
        goals = _Goals.of(planned.candidates)
        kept = search.measure_front(planned.candidates, goals)
        points = [
            Point(each, quality, None, command_of(each, profile, options, space.tokens))
            for each in kept
            if (quality := search.quality(each))
        ]
        if profile.name == HOST or machine is not None:
            points = search.time(points, machine)
    if not points:
        raise InputError(f"nothing could be measured: {'; '.join(dict.fromkeys(search.failed.values()))}")
    return Found(
        device=profile.name,
        on=on,
        points=tuple(sorted(points, key=lambda each: (each.quality.kl, each.candidate.memory))),
        reference=f"{reference.label}, full {full_dtype(backend.NAME)} cache",
        text=text_name,
        text_crc32=checksum_of(ids),
        tokens=ids.size,
        fitting=len(planned.candidates),
        refused=planned.refused,
        basis=planned.basis,
        measured=search.measured,
        remembered=search.remembered,
        failed=tuple(search.failed.items()),
        unpredicted=goals.unpredicted,
        trial_peak=search.peak,
    )


def cluster_of(scheduler: str | None) -> Any:
    """A context with the Runner of a cluster, or with that of this machine."""
    if scheduler is None:
        return nullcontext(run_here)
    from edge.lab.searching.cluster import cluster  # here: most searches need no Dask

    return cluster(scheduler)


def _open(name: str | Path) -> Model:
    """Open a model. Raises UnsupportedError for models in ONNX, which have no other weight types, and for encoders,
    which predict no tokens."""
    model = open_model(name)
    if model.file.folder is not None:
        raise UnsupportedError(f"{name} is a model in ONNX: edge search reads GGUF files")
    if model.spec.encoder:
        raise UnsupportedError(f"{name} is an encoder: it predicts no tokens whose loss could be measured")
    return model


def _read(text: str | Path | None) -> tuple[str, str]:
    """A text's name and content. Raises InputError."""
    if not isinstance(text, Path):
        return ("prose, code and lists that come with edge", TEXT) if text is None else ("a text", text)
    try:
        if content := text.read_text(encoding="utf-8", errors="replace"):
            return text.name, content
    except OSError as error:
        raise InputError(f"{text} cannot be read ({error.strerror})") from None
    raise InputError(f"{text} is empty")


def _tokens(opened: Sequence[tuple[str, Model]], text: str, wanted: int | None) -> IntArray:
    """The text's tokens, int32 [n], the same for all models. Raises InputError."""
    context = min(model.spec.context for _, model in opened)
    if wanted is not None and wanted > context:
        raise InputError(f"--tokens must be at most {context}, which is what the model knows positions for")
    found = [model.encode_text(text, most=wanted or min(_TOKENS, context)) for _, model in opened]
    (first, model), ids = opened[0], found[0]
    for (other, theirs), their_ids in zip(opened[1:], found[1:], strict=True):
        if theirs.spec.vocab != model.spec.vocab or their_ids.tolist() != ids.tolist():
            raise InputError(f"{first} and {other} have different vocabularies: their losses cannot be compared")
    if ids.size < (wanted or _LEAST_TOKENS):
        raise InputError(
            f"the text has {ids.size} tokens of {wanted or _LEAST_TOKENS}: give a longer one with --text, or fewer "
            f"with --tokens"
        )
    return ids


@dataclass(frozen=True)
class _Goals:
    """The goals besides loss and memory: those that plans predict for every candidate."""

    speed: bool
    joules: bool

    @classmethod
    def of(cls, candidates: Iterable[Candidate]) -> _Goals:
        found = list(candidates)
        return cls(all(each.tok_s for each in found), all(each.joules for each in found))

    @property
    def unpredicted(self) -> tuple[str, ...]:
        return tuple(name for name, known in (("speed", self.speed), ("joules", self.joules)) if not known)

    def costs(self, candidate: Candidate, kl: float) -> tuple[float, ...]:
        """The costs of a candidate, in order of importance, for `front`."""
        found = [max(kl, SAME_KL), float(candidate.memory)]
        if self.speed and candidate.tok_s:
            found.append(1 / (candidate.tok_s.value * candidate.kept_speed))
        if self.joules and candidate.joules:
            found.append(candidate.joules.value * candidate.kept_joules)
        return tuple(found)


_Key = tuple[str, str | None, Cell, int | None]
"""The identity of a trial within a search: file and type of the weights, KV setting, threads (None for losses)."""


class _Search:
    """Trials of a search and their outcomes."""

    def __init__(self, base: Trial, runner: Runner, on_progress: OnProgress) -> None:
        """base: the trial of the reference; all others are variants of it."""
        self._base, self._runner, self._on_progress = base, runner, on_progress
        self._found: dict[_Key, Outcome] = {}
        self.failed: dict[str, str] = {}
        self.measured = self.remembered = self.peak = 0

    def measure_alone(self, candidates: Sequence[Candidate], weights: Iterable[Weights]) -> None:
        """Measure each weight type with a full cache, and each KV dtype and policy with the file's own weights."""
        own = {each.sha256: each for each in weights if each.type is None}
        trials = []
        for each in candidates:
            at = own[each.weights.sha256]
            pairs = [(at, self._base.cell), *((at, part) for part in self._parts(each.cell))]
            trials += [replace(self._base, weights=one, cell=cell)
                       for one, cell in [*pairs, (each.weights, self._base.cell)]]  # fmt: skip
        self._run(trials, self._runner)

    def measure_front(self, candidates: Sequence[Candidate], goals: _Goals) -> list[Candidate]:
        """Measure the candidates on the front jointly, until all on it have been measured. Returns the front."""
        while True:
            costs = {each: goals.costs(each, loss) for each in candidates if (loss := self._loss(each)) is not None}
            kept = front(list(costs), costs.__getitem__)
            trials = [replace(self._base, weights=each.weights, cell=each.cell) for each in kept]
            missing = [each for each in trials if _key(each) not in self._found]
            if not missing:
                return kept
            self._run(missing, self._runner)

    def time(self, points: Sequence[Point], machine: Machine | None) -> list[Point]:
        """Measure speed and joules of points, here or on another machine. Returns those that none then dominates."""
        trials = [
            replace(self._base, what="speed", weights=at.weights, cell=at.cell, threads=at.threads, machine=machine)
            for at in (each.candidate for each in points)
        ]
        self._run(trials, run_here)
        timed = [
            replace(each, speed=speed)
            for trial, each in zip(trials, points, strict=True)
            if (speed := self._found[_key(trial)].speed)
        ]
        joules = all(each.joules for each in timed)
        return front(timed, lambda each: _measured_costs(each, joules=joules))

    def kv_losses(self, reference: Weights) -> dict[str, KVLoss]:
        """The losses of KV dtypes alone, by dtype, without the reference's own dtype."""
        found = {}
        for (sha256, kind, cell, _), outcome in self._found.items():
            alone = (sha256, kind, cell.policy) == (reference.sha256, None, FULL)
            if alone and cell.kv_dtype not in (None, full_dtype(self._base.backend)) and (quality := outcome.quality):
                found[cell.kv_dtype] = KVLoss(quality.kl, quality.kl_stderr, quality.tokens)
        return found

    def quality(self, candidate: Candidate) -> Quality | None:
        """The jointly measured quality; None if the trial failed."""
        return self._found[candidate.weights.sha256, candidate.weights.type, candidate.cell, None].quality

    def _loss(self, candidate: Candidate) -> float | None:
        """KL as measured jointly, else the sum of separately measured losses; None: one of these trials failed."""
        sha256, kind = candidate.weights.sha256, candidate.weights.type
        if (joint := self._found.get((sha256, kind, candidate.cell, None))) is not None:
            return joint.quality.kl if joint.quality else None
        dtype, policy = self._parts(candidate.cell)
        alone = [(kind, self._base.cell), (None, self._base.cell), (None, dtype), (None, policy)]
        found = [each for own, cell in alone if (each := self._found[sha256, own, cell, None].quality)]
        if len(found) < len(alone):
            return None
        rounded, as_it_is, *parts = [each.kl for each in found]
        return rounded + sum(max(0.0, each - as_it_is) for each in parts)

    def _parts(self, cell: Cell) -> tuple[Cell, Cell]:
        """A KV setting's dtype alone, and its policy alone."""
        return Cell(FULL, cell.kv_dtype), replace(cell, kv_dtype=self._base.cell.kv_dtype)

    def _run(self, trials: Sequence[Trial], runner: Runner) -> None:
        """Run trials that have no outcome yet, in this search or remembered from an earlier one."""
        wanted = [each for key, each in {_key(each): each for each in trials}.items() if key not in self._found]
        missing = []
        for trial in wanted:
            if known := recall(trial):
                self._found[_key(trial)] = known
                self.remembered += 1
            else:
                missing.append(trial)
        if missing:
            self._on_progress(missing[0].label, 0, len(missing))
        for done, (trial, outcome) in enumerate(runner(missing), start=1):
            remember(trial, outcome)
            self._found[_key(trial)] = outcome
            self.measured += 1
            self.peak = max(self.peak, outcome.peak)
            if outcome.reason:
                self.failed[trial.label] = outcome.reason
            self._on_progress(missing[min(done, len(missing) - 1)].label, done, len(missing))


def _key(trial: Trial) -> _Key:
    return trial.weights.sha256, trial.weights.type, trial.cell, trial.threads


def _measured_costs(point: Point, *, joules: bool) -> tuple[float, ...]:
    assert point.ranking_tok_s is not None
    costs = (max(point.quality.kl, SAME_KL), float(point.candidate.memory), 1 / point.ranking_tok_s)
    return (*costs, point.ranking_joules) if joules and point.ranking_joules else costs
