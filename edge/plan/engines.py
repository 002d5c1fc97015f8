"""Which engine a plan is for: on the CPU, or on a GPU where that was faster when both were timed.

`edge/run/race.py` times them, once per model and device; the cache folder keeps what it found.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial

from edge.backends import engine_named, engines_with, find_backend
from edge.backends.base import Backend
from edge.devices.graphics import VARIABLE, is_off, seen_gpus
from edge.devices.host import processor, usable_cores
from edge.devices.memory import MemoryLimit, memory_use
from edge.errors import BudgetError, InputError, MissingExtraError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec, model_key
from edge.options import AUTO, Options
from edge.plan.plan import Plan, make_plan
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
        """Of a typical request."""
        return PROMPT / self.prefill + ANSWER / self.decode if self.prefill > 0 < self.decode else float("inf")


@dataclass(frozen=True)
class Race:
    """adapter: the GPU and its driver (`GPUMemory.adapter`). engine: that on the CPU."""

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


_NOT_TIMED = "the CPU's, until a first run without --time and --energy has timed the GPU, too"


def plan_here(file: GGUFFile, spec: ModelSpec, options: Options, more: int = 0) -> tuple[Backend, Plan]:
    """The engine of `options.backend` and its plan on this device; more: see `make_plan`. `auto` takes the GPU if it
    was faster and the model fits there.

    Raises what `find_backend` and `make_plan` raise.
    """
    options = with_engine(options)
    may, race = may_use_gpu(file, options), None
    if may and (race := find_race(spec)) and race.is_gpu_faster and (rival := gpu_rival(file, spec, options)):
        with suppress(BudgetError, UnsupportedError, InputError):
            plan = make_plan(spec, rival, options, more=more, first_run=partial(rival.first_run, file, spec))
            if plan.config.adapter == race.adapter:
                return rival, replace(plan, chosen=race.about())
    if options.backend == ON_GPU and options.memory is not None and not _has_room(options):
        return _unseen(spec, options, more)
    backend = find_backend(options.backend, file, spec, options.kv_dtype)
    plan = make_plan(spec, backend, options, more=more, first_run=partial(backend.first_run, file, spec))
    return backend, replace(plan, chosen=(race.about() if race else _NOT_TIMED) if may else "")


def _unseen(spec: ModelSpec, options: Options, more: int) -> tuple[Backend, Plan]:
    """Raises BudgetError for a GPU that no driver has shown yet: as one that shares main memory, since a card needs
    less of it."""
    engine = engine_named(ON_GPU)
    engine.check_installed()
    options, limit = replace(options, gpu_memory=None), MemoryLimit(options.memory or 0, "budget")
    return engine, make_plan(
        spec, engine, options, elsewhere=limit, more=more, first_run=lambda config: engine.most_first()
    )


def with_engine(options: Options) -> Options:
    """`auto` with an execution provider is the engine that has them."""
    if options.backend != AUTO or options.provider is None:
        return options
    return replace(options, backend=engines_with("providers")[0])


def may_use_gpu(file: GGUFFile, options: Options) -> bool:
    """Whether `auto` may choose a GPU: there may be one, and no option is for another engine. Loads no driver."""
    others = (options.lora, options.provider, options.gpu_layers, file.folder)
    if options.backend != AUTO or is_off() or any(each is not None for each in others) or not _has_room(options):
        return False
    return bool(os.environ.get(VARIABLE) or seen_gpus())


def _has_room(options: Options) -> bool:
    """Whether the budget has room for drivers of GPUs, which even a refusal would load."""
    driver = engine_named(ON_GPU).DRIVER_BYTES
    return options.memory is None or memory_use().rss + driver <= options.memory


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
    """What was measured of models alike on this device, by this version of edge."""
    path = cache.find("races", _key(spec), ".json")
    try:
        return None if path is None else parse(Race, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def keep_race(spec: ModelSpec, race: Race) -> None:
    """Raises CacheError if the cache folder cannot be written."""
    with cache.create("races", _key(spec), ".json", about=f"{spec.label}: {race.about()}") as path:
        path.write_text(json.dumps(asdict(race)), encoding="utf-8")


def _key(spec: ModelSpec) -> str:
    """Of model, processor and GPU, as far as they are known without a driver."""
    device = (cpu_key(), seen_gpus(), os.environ.get(VARIABLE, ""))
    return hashlib.sha256(repr((model_key(spec), device, own_versions()["edge"])).encode()).hexdigest()[:32]


def cpu_key() -> str:
    """The processor, as far as speed depends on it."""
    return f"{processor().name}, {usable_cores()} cores"
