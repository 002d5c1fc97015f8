"""An engine loaded by a plan, and reloaded when other adapters need more room."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import cast

from edge.backends.base import AdaptedEngine, Backend, CardEngine, Engine, EngineConfig, LoadProgress
from edge.backends.counts import ExpertCounts
from edge.backends.importance import RowImportance
from edge.devices.child import children_peak, room_for_children
from edge.devices.memory import release_free_memory
from edge.devices.power import measure_card
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.adapters.lora import Lora, open_lora
from edge.model.adapters.lora_file import Loras
from edge.model.model import Model
from edge.model.structure.spec import ModelSpec
from edge.options import Options
from edge.plan.plan import Plan, plan_with_lora
from edge.run.budgets.meters import EnergyMeter
from edge.run.drafting.opening import open_drafter
from edge.run.reclaim import Reclaimer
from edge.run.sequences.sequence import TokenSequence


class Loaded:
    """The engine, its plan, the sequence whose rows it keeps, and the owner of memory that can be returned."""

    engine: Engine
    plan: Plan
    sequence: TokenSequence
    reclaimer: Reclaimer

    def __init__(
        self, model: Model, backend: Backend, plan: Plan, options: Options, meter: EnergyMeter,
        progress: LoadProgress | None = None,
    ) -> None:  # fmt: skip
        self.model, self.backend, self._options, self._meter = model, backend, options, meter
        self.with_children = children_peak()  # peak bytes of this process and a child together
        started = time.perf_counter()
        self.learned = self._find_learned() if plan.policy.needs.ranks else None
        lora = open_lora(options.lora or (), model.file, model.spec)
        self.drafter = open_drafter(model, plan, options, meter, self._new_engine)
        try:
            self._load(plan, lora, progress)
        except BaseException:
            if self.drafter:
                self.drafter.close()
            raise
        self.seconds = time.perf_counter() - started

    def close(self) -> None:
        """Free the engines."""
        self.engine.close()
        if self.drafter:
            self.drafter.release()
            self.drafter.close()

    def _find_learned(self) -> RowImportance:
        """The fitted importance of rows. Fitting takes some seconds, once per model, before the model is loaded."""
        from edge.backends.reference import learned  # here: other policies' starts do without

        return learned.find_for(self.model.file, self.model.spec, self.model.tokenizer.encode)

    def _new_engine(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: LoadProgress | None = None
    ) -> Engine:
        with room_for_children(self._options.memory) as room:
            engine = self.backend.load(file, spec, config, progress)
        self.with_children = max(self.with_children, room.most)
        return engine

    def _load(self, plan: Plan, lora: Lora | None, progress: LoadProgress | None = None) -> None:
        engine = self._new_engine(self.model.file, self.model.spec, plan.config, progress)
        try:
            if lora is not None:
                cast(AdaptedEngine, engine).set_lora(lora)
            if self.drafter:
                with room_for_children(self._options.memory) as room:
                    self.drafter.bind(engine)
                self.with_children = max(self.with_children, room.most)
        except BaseException:
            engine.close()
            raise
        if engine.capabilities.gpu and (card := cast(CardEngine, engine).card):
            measure_card(self._meter, card)
        self.engine, self.plan = engine, plan
        cache = self._options.prompt_cache
        prefix = self.model.prefix
        self.sequence = TokenSequence(engine, plan, lora, cache, self._meter, self.drafter, self.learned, prefix)
        self.reclaimer = Reclaimer([self.sequence])

    def expert_counts(self) -> ExpertCounts | None:
        """A copy of the expert counts so far; None unless the engine holds only some experts at a time."""
        found: ExpertCounts | None = getattr(self.engine, "experts", None)
        return found and replace(found)

    def team(self) -> tuple[int, ...]:
        """Passes of 1, 2, … threads so far; none of engines that do not count them."""
        return tuple(getattr(self.engine, "team", ()))

    def open_lora(self, files: Loras) -> Lora | None:
        """Open adapters of this model. Raises InputError, ModelFormatError, UnsupportedError."""
        adapters = open_lora(files, self.model.file, self.model.spec)
        if adapters is not None and not self.engine.capabilities.lora:
            raise UnsupportedError(f"the {self.plan.backend} engine runs no LoRA adapters")
        return adapters

    def set_lora(self, files: Loras) -> None:
        """As `Session.set_lora`."""
        spec, engine, before = self.model.spec, self.engine, self.sequence.lora
        adapters = self.open_lora(files)
        lost = self.sequence.lost or engine.kv.length > 0
        if adapters is not None and adapters.size.rank > self.plan.config.lora_rank:
            self._load_again(plan_with_lora(self.plan, spec, self.backend, adapters.size), adapters, lost)
        elif adapters is not None or before is not None:
            try:
                cast(AdaptedEngine, engine).set_lora(adapters)
            except Exception:
                cast(AdaptedEngine, engine).set_lora(before)
                self.sequence.adopt(before, lost)
                raise
        self.sequence.adopt(adapters, lost)

    def _load_again(self, plan: Plan, lora: Lora, lost: bool) -> None:
        """Reload the engine with room for other adapters; if that fails, as it was, without the conversation."""
        before = self.sequence.lora
        if self.drafter:  # it may hold the weights of the engine
            self.drafter.release()
        self.engine.close()
        release_free_memory()
        try:
            self._load(plan, lora)
        except BaseException:
            self._load(self.plan, before)
            self.sequence.adopt(before, lost)
            raise
