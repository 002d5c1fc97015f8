"""The settings of a run: the user's options, and decisions of the plan where they leave something open."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING

from edge.backends.base import Backend, EngineConfig
from edge.backends.counts import GPUMemory, Tuned
from edge.devices.host import usable_cores
from edge.kv import make_policy, pinned_rows
from edge.kv.policy import Policy
from edge.model.spec import ModelSpec
from edge.options import Options
from edge.records import dataclass

if TYPE_CHECKING:
    from edge.plan.kv_losses import Losses


@dataclass(frozen=True)
class Resolved:
    """One way to meet the user's options. Made by `resolve.py`, and never changed."""

    spec: ModelSpec
    backend: Backend
    options: Options  # as the user stated them
    kv_policy: str
    kv_dtype: str
    rows: int | None  # by --max-kv-size, --kv-memory or graphs of fixed sizes; None: as many as fit
    chunk: int | None  # tokens run at once in prefill, likewise
    threads: int | None  # stated, or of another device
    tuned: Tuned | None = None  # for this device
    whole: bool = False  # only with all rows that the run is known to need, and all weights, in memory
    dtype_by: str = ""  # what `auto` chose the KV dtype by, where it chose one; empty: it did not
    losses: Losses = field(default_factory=dict)  # of KV dtypes, as measured of this model on this engine
    forced: str | None = None  # the reason for policy `full` unasked: the engine can evict no rows of this model
    gpu: GPUMemory | None = None  # that the engine would use here
    emulated: bool = False  # `EngineConfig.emulated`

    @cached_property
    def policy(self) -> Policy:
        """Raises InputError for an unknown one."""
        return make_policy(self.kv_policy, self.options.sinks, self.options.keep or 0)

    @property
    def pinned(self) -> int:
        """Rows that stay; of a policy that evicts none, as many as its cache must have room for."""
        return pinned_rows(self.policy) if self.policy.evicts else self.options.sinks

    @property
    def drafts(self) -> int:
        """Drafted tokens to verify at once; 0 where a policy would see the attention that wrong ones paid, or where a
        token alone reads other rows."""
        off = self.options.speculate == "off" or self.policy.needs.queries or self.policy.needs.reads
        return 0 if off else self.backend.most_drafts(self.spec, self.tuned.values if self.tuned else {})

    def draft_config(self, config: EngineConfig) -> EngineConfig | None:
        """Of the model that drafts beside an engine with this configuration; None if there is none."""
        if (draft := self.options.draft_file) is None:
            return None
        rows = min(config.capacity, self.backend.most_rows(draft.spec, None).rows)
        dtype = self.backend.CAPABILITIES.kv_dtypes[0]
        return EngineConfig(rows, min(config.chunk, rows), dtype, config.threads, pinned=0, frugal=config.frugal)

    def draft_bytes(self, config: EngineConfig) -> int:
        """Of that model; 0 without one."""
        own, draft = self.draft_config(config), self.options.draft_file
        if own is None or draft is None:
            return 0
        need = self.backend.footprint(draft.spec, own)
        return need.weights + need.kv + need.scratch + need.runtime

    @property
    def fits(self) -> bool:
        """Nothing will have to be evicted."""
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
