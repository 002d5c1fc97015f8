"""The settings of a run: the user's options, and the plan's decisions where they leave settings open."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING

from edge.backends.base import Backend, EngineConfig
from edge.backends.counts import Footprint, GPUMemory, Tuned
from edge.devices.host import usable_cores
from edge.kv import make_policy, pinned_rows
from edge.kv.policy import Policy
from edge.model.structure.spec import ModelSpec
from edge.options import AUTO, Options
from edge.records import dataclass

if TYPE_CHECKING:
    from edge.plan.kv_losses import Losses


# A layer for multi-token prediction, or an EAGLE-3 head: its KV rows and chunk, and the tokens whose states may wait.
MTP_ROWS, MTP_CHUNK, MTP_STATES = 2048, 64, 512
_STATE_COPIES = 2  # the waiting states, and those of a pass, or all of them joined for the layer


@dataclass(frozen=True)
class Resolved:
    """One way to meet the user's options. Made by `resolve.py`."""

    spec: ModelSpec
    backend: Backend
    options: Options  # as the user stated them
    kv_policy: str
    kv_dtype: str
    rows: int | None  # by --max-kv-size, --kv-memory or graphs of fixed sizes; None: as many as fit
    chunk: int | None  # tokens run at once in prefill, likewise
    threads: int | None  # stated, or of another device
    tuned: Tuned | None = None  # for this device
    whole: bool = False  # requires all rows that the run is known to need, and all weights, in memory
    dtype_by: str = ""  # why `auto` chose the KV dtype; empty: it did not choose
    losses: Losses = field(default_factory=dict)  # of KV dtypes, measured for this model and engine
    forced: str | None = None  # why policy `full` replaces the default: the engine cannot evict rows of this model
    gpu: GPUMemory | None = None  # the GPU that the engine would use here
    emulated: bool = False  # `EngineConfig.emulated`

    def footprint(self, config: EngineConfig) -> Footprint:
        """Of the engine, counted once: a refusal counts all configurations again."""
        key = repr(config)
        if key not in self._footprints:
            self._footprints[key] = self.backend.footprint(self.spec, config)
        return self._footprints[key]

    @cached_property
    def _footprints(self) -> dict[str, Footprint]:
        return {}

    @cached_property
    def policy(self) -> Policy:
        """Raises InputError for an unknown one."""
        prefix = self.options.prefix_rows
        return make_policy(self.kv_policy, self.options.sinks + prefix, (self.options.keep or 0) + prefix)

    @property
    def pinned(self) -> int:
        """The rows that are never evicted; for a policy that evicts none, those that its cache must have room for."""
        return pinned_rows(self.policy) if self.policy.evicts else self.options.sinks + self.options.prefix_rows

    @property
    def drafts(self) -> int:
        """Most drafted tokens to verify in a pass; 0 if the policy observes attention, to which wrong drafts would
        contribute, or if single tokens read other rows than several."""
        asked = "on" if self.backend.DRAFTS_ASKED else AUTO
        off = self.options.speculate not in ("on", asked) or self.policy.needs.queries or self.policy.needs.reads
        return 0 if off else self.backend.most_drafts(self.spec, self.tuned.values if self.tuned else {})

    def draft_config(self, config: EngineConfig) -> EngineConfig | None:
        """The configuration of the model that drafts beside an engine of this configuration; None if there is none."""
        if (spec := self._draft_spec(config)) is None:
            return None
        if spec.assists:  # its layers read the model's rows
            return EngineConfig(1, 1, config.kv_dtype, config.threads, frugal=config.frugal)
        rows, chunk = min(config.capacity, self.backend.most_rows(spec, None).rows), config.chunk
        if config.mtp or spec.features:
            rows, chunk = min(rows, MTP_ROWS), min(chunk, MTP_CHUNK)
        dtype = self.backend.CAPABILITIES.kv_dtypes[0]
        return EngineConfig(rows, min(chunk, rows), dtype, config.threads, pinned=0, frugal=config.frugal)

    def _draft_spec(self, config: EngineConfig) -> ModelSpec | None:
        """The spec of the model that drafts, which may be the model's own layer."""
        if config.mtp:
            return self.spec.mtp
        draft = self.options.draft_file
        return draft.spec if draft else None

    @property
    def mtp(self) -> bool:
        """Whether the model's own layer may draft: with one sequence only, since its rows need the model's states, and
        if the user names no draft model."""
        alone = self.options.sequences == 1 and self.options.draft is None
        return alone and self.drafts > 0 and self.backend.runs_mtp(self.spec)

    def draft_bytes(self, config: EngineConfig) -> int:
        """Bytes of the model that drafts; 0 without one."""
        own, spec = self.draft_config(config), self._draft_spec(config)
        if own is None or spec is None:
            return 0
        around, draft = 0, self.options.draft_file
        if draft and (spec.assists or spec.features):
            from edge.backends.reference.assistant import around_bytes  # here: few models have one

            own_bytes = self.backend.around_bytes(spec)
            around = around_bytes(spec) if own_bytes is None else own_bytes
            spec = draft.layers_for(self.spec)[1] if spec.assists else spec
        need = self.backend.footprint(spec, own)
        state = spec.features.size if spec.features else spec.hidden if config.mtp else 0
        waiting = 4 * MTP_STATES * _STATE_COPIES * state
        return need.weights + need.kv + need.scratch + need.runtime + waiting + around

    @property
    def fits(self) -> bool:
        """Whether the run is known to stay within the model's context."""
        expected = self.options.expected_tokens
        return expected is not None and expected <= self.spec.context

    def config(self, rows: int) -> EngineConfig:
        """A configuration with this number of KV rows, and the shortest of chunks."""
        options, policy = self.options, self.policy
        return EngineConfig(
            capacity=rows,
            chunk=1,
            kv_dtype=self.kv_dtype,
            threads=self.threads or usable_cores(),
            sequences=options.sequences,
            drafts=self.drafts if options.draft is not None else 0,
            taps=list(options.draft_file.taps) if options.draft_file else [],
            logits_rows=options.logits_rows,
            observes=bool(policy.needs.queries),
            per_head=policy.needs.looks,
            uneven=policy.needs.uneven != "token",
            reads=policy.needs.reads,
            pinned=pinned_rows(policy) if policy.close_gaps else 0,
            provider=options.provider or "cpu",
            emulated=self.emulated,
            gpu_layers=options.gpu_layers or 0,
            adapter=self.gpu.adapter if self.gpu else "",
            lora_rank=options.lora_size.rank,
            lora_bytes=options.lora_size.nbytes,
            loras=options.sequences if options.loras is None else options.loras,
        )
