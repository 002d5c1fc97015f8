"""The engine of a plan: on the CPU, or on a GPU where that was faster when both were timed.

`edge/run/starting/race.py` times them, once per model and device; the cache folder keeps the result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from edge.backends import engine_named, engines_with, find_backend
from edge.backends.base import Backend, EngineConfig
from edge.devices.graphics import VARIABLE, is_off, seen_gpus
from edge.devices.host import processor, usable_cores
from edge.devices.keys import key_of
from edge.devices.memory import MemoryLimit, memory_use
from edge.errors import BudgetError, CacheError, InputError, MissingExtraError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.drafters.draft import check_draft
from edge.model.structure.mtp import mtp_file
from edge.model.structure.spec import ModelSpec, model_key
from edge.options import AUTO, Options
from edge.plan.kv_losses import find_losses
from edge.plan.plan import Plan, first_fit, make_plan
from edge.plan.resolve import resolve
from edge.plan.resolved import Resolved
from edge.records import dataclass
from edge.storage import cache
from edge.storage.versions import own_versions
from edge.values import parse

ON_GPU = "gpu"
PROMPT, ANSWER = 128, 128  # tokens of the request by which engines are compared


@dataclass(frozen=True)
class Pace:
    """Tokens per second, measured. An engine that failed has 0."""

    prefill: float
    decode: float

    @property
    def seconds(self) -> float:
        """Seconds of a typical request, of PROMPT and ANSWER tokens; infinite for an engine that failed."""
        return PROMPT / self.prefill + ANSWER / self.decode if self.prefill > 0 < self.decode else float("inf")


@dataclass(frozen=True)
class Race:
    """The result of a race. adapter: the GPU and its driver (`GPUMemory.adapter`). engine: the one on the CPU."""

    adapter: str
    engine: str
    cpu: Pace
    gpu: Pace

    @property
    def is_gpu_faster(self) -> bool:
        return self.gpu.seconds < self.cpu.seconds

    def about(self) -> str:
        paces = {self.engine: self.cpu, ON_GPU: self.gpu}
        said = [f"{name} {pace.decode:.3g} tok/s, prompts {pace.prefill:.3g}" for name, pace in paces.items()]
        return f"{ON_GPU if self.is_gpu_faster else self.engine} was faster here (measured: {'; '.join(said)})"


Timed = Callable[[Sequence[tuple[Backend, Plan]]], Sequence[Pace]]

_MAY_EXCEED = "a first run may exceed --memory: what this GPU's driver takes to compile was not measured"
_UNBOUNDED = f"the CPU's, since on the GPU {_MAY_EXCEED}; --backend={ON_GPU} takes it all the same"
_NOT_TIMED = "the CPU's, until a first run without --time and --energy has timed the GPU, too"


def plan_here(
    file: GGUFFile, spec: ModelSpec, options: Options, more: int = 0, timed: Timed | None = None
) -> tuple[Backend, Plan]:
    """The engine of `options.backend` and its plan on this device; more: see `make_plan`. `auto` takes the GPU if it
    was faster and the model fits there. timed: times the engines on CPU and GPU with their plans if they have not been
    timed here yet; None: choose the CPU's then.

    Raises the errors of `find_backend` and `make_plan`.
    """
    if options.backend == ON_GPU and options.memory is not None and not _has_room(options):
        return _unseen(spec, options, more)
    may = may_use_gpu(file, options)
    race = find_race(spec) if may else None
    rival = None
    if race.is_gpu_faster if race else may and timed:
        rival = gpu_rival(file, spec, options)
    passed_over = rival is not None and _may_exceed(rival, options)

    def resolved(engine: Backend) -> list[Resolved]:
        return resolve(spec, engine, options, elsewhere=False, losses=find_losses(file, engine, options))

    def planned(runs: list[Resolved]) -> tuple[Backend, Plan]:
        engine, draft = runs[0].backend, options.draft_file
        if draft:
            check_draft(draft, file, spec)

        def first_run(config: EngineConfig) -> int:
            takes, own = engine.first_run(file, spec, config), runs[0].draft_config(config)
            if any(run.policy.needs.ranks for run in runs):
                from edge.backends.reference.learned import making_bytes  # here: few runs need it

                takes = max(takes, making_bytes(file, spec))
            if own is not None and (layer := mtp_file(file) if config.mtp else None):
                assert spec.mtp is not None
                after, need = engine.first_run(layer, spec.mtp, own), engine.footprint(spec, config)
                loaded = need.weights + need.kv + need.scratch + need.runtime + need.lora
                return max(takes, after and loaded + after)
            if draft is None or own is None:
                return takes
            if draft.assists:  # its layers are compiled beside the loaded model
                after, need = engine.first_run(*draft.layers_for(spec), own), engine.footprint(spec, config)
                return max(takes, after and need.weights + need.kv + need.scratch + need.runtime + need.lora + after)
            beside = takes + runs[0].draft_bytes(config) if takes else 0  # the model that drafts is loaded first
            return max(beside, engine.first_run(draft.file, draft.spec, own))

        return engine, first_fit(runs, more=more, first_run=first_run)

    if rival and not passed_over:
        with suppress(BudgetError, UnsupportedError, InputError):  # only one engine can run this: its own plan reports
            ours = resolved(rival)
            engine, plan = planned(ours)
            if race and race.adapter == plan.config.adapter:
                return engine, replace(plan, chosen=race.about())
            if timed:
                usual = resolved(find_backend(AUTO, file, spec, options.kv_dtype))
                cpu, gpu = timed([planned(usual), (engine, plan)])
                race = Race(plan.config.adapter, usual[0].backend.NAME, cpu, gpu)
                with suppress(CacheError):
                    keep_race(spec, race)
                engine, plan = planned(ours if race.is_gpu_faster else usual)  # again: memory left by the race counts
                return engine, replace(plan, chosen=race.about())
    engine, plan = planned(resolved(find_backend(engine_of(options), file, spec, options.kv_dtype)))
    if passed_over:
        return engine, replace(plan, chosen=_UNBOUNDED)
    if _may_exceed(engine, options):
        return engine, replace(plan, chosen=_MAY_EXCEED)
    return engine, replace(plan, chosen=(race.about() if race else _NOT_TIMED) if may else "")


def _unseen(spec: ModelSpec, options: Options, more: int) -> tuple[Backend, Plan]:
    """Plan for a GPU without loading its driver, which does not fit the budget. Assumes a GPU that shares main memory,
    since a card needs less of it. Raises BudgetError."""
    engine = engine_named(ON_GPU)
    engine.check_installed()
    options, limit = replace(options, gpu_memory=None), MemoryLimit(options.memory or 0, "budget")
    return engine, make_plan(
        spec, engine, options, elsewhere=limit, more=more, first_run=lambda config: engine.most_first()
    )


def engine_of(options: Options) -> str:
    """The engine that options name; `auto` with an execution provider means the engine that has providers."""
    return engines_with("providers")[0] if options.backend == AUTO and options.provider is not None else options.backend


def may_use_gpu(file: GGUFFile, options: Options) -> bool:
    """Whether `auto` may choose a GPU: there may be one, and no option requires another engine. Loads no driver."""
    others = (options.lora, options.prefix, options.provider, options.gpu_layers, file.folder)
    if options.backend != AUTO or is_off() or any(each is not None for each in others) or not _has_room(options):
        return False
    return bool(os.environ.get(VARIABLE) or seen_gpus())


def _has_room(options: Options) -> bool:
    """Whether the budget has room for a GPU's driver, which even a refusal would load."""
    driver = engine_named(ON_GPU).DRIVER_BYTES
    return options.memory is None or memory_use().rss + driver <= options.memory


def _may_exceed(engine: Backend, options: Options) -> bool:
    """Whether a first run may take more than its plan counts, and thus exceed the memory budget."""
    return options.memory is not None and not engine.bounded()


def gpu_rival(file: GGUFFile, spec: ModelSpec, options: Options) -> Backend | None:
    """The engine on the GPU, if there is a GPU and it runs this model."""
    engine = engine_named(ON_GPU)
    try:
        engine.check_installed()
        engine.check_supported(file, spec)
    except (MissingExtraError, UnsupportedError):
        return None
    return engine if options.kv_dtype in (None, *engine.CAPABILITIES.kv_dtypes) else None


def find_race(spec: ModelSpec) -> Race | None:
    """The race of a model of this shape on this device, by this version of edge; None if there was none."""
    path = cache.find("races", _key(spec), ".json")
    try:
        return None if path is None else parse(Race, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def keep_race(spec: ModelSpec, race: Race) -> None:
    """Keep a race in the cache folder. Raises CacheError if it cannot be written."""
    with cache.create("races", _key(spec), ".json", about=f"{spec.label}: {race.about()}") as path:
        path.write_text(json.dumps(asdict(race)), encoding="utf-8")


def _key(spec: ModelSpec) -> str:
    """The key of model, processor and GPU, as far as they are known without a driver."""
    device = (cpu_key(), seen_gpus(), os.environ.get(VARIABLE, ""))
    return key_of(repr((model_key(spec), device, own_versions()["edge"])))


def cpu_key() -> str:
    """The processor, as far as speed depends on it."""
    return f"{processor().name}, {usable_cores()} cores"
