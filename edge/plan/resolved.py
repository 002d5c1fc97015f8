"""What a run goes by: the user's options, and what the plan decided where they leave it open."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from edge.backends.base import Backend, EngineConfig
from edge.backends.counts import GPUMemory, Tuned
from edge.devices.host import usable_cores
from edge.kv import make_policy, pinned_rows
from edge.kv.policy import Policy
from edge.model.spec import ModelSpec
from edge.options import Options


@dataclass(frozen=True)
class Resolved:
    """One way to meet the user's options, which stay as they were stated. Made by `resolve.py`, and never changed.

    kv_policy, kv_dtype: those of the run. rows: of the KV cache, by --max-kv-size, --kv-memory or graphs of fixed
    sizes; None: as many as fit. chunk: tokens run at once in prefill, likewise. threads: those that were stated, or of
    another device. tuned: what was found for this device. whole: only with all rows that the run is known to need, and
    all weights, in memory. forced: why the policy is `full` without having been asked for: the engine can evict no rows
    of this model. gpu: that the engine would use here. emulated: `EngineConfig.emulated`.
    """

    spec: ModelSpec
    backend: Backend
    options: Options
    kv_policy: str
    kv_dtype: str
    rows: int | None
    chunk: int | None
    threads: int | None
    tuned: Tuned | None = None
    whole: bool = False
    forced: str | None = None
    gpu: GPUMemory | None = None
    emulated: bool = False

    @cached_property
    def policy(self) -> Policy:
        """Raises InputError for one that there is not."""
        return make_policy(self.kv_policy, self.options.sinks, self.options.keep or 0)

    @property
    def pinned(self) -> int:
        """Rows that stay; of a policy that evicts none, as many as its cache must have room for."""
        return pinned_rows(self.policy) if self.policy.evicts else self.options.sinks

    @property
    def fits(self) -> bool:
        """Nothing will have to be evicted."""
        expected = self.options.expected_tokens
        return expected is not None and expected <= self.spec.context

    def config(self, rows: int) -> EngineConfig:
        """With so many KV rows, and the shortest of chunks."""
        options, policy = self.options, self.policy
        return EngineConfig(
            capacity=rows,
            chunk=1,
            kv_dtype=self.kv_dtype,
            threads=self.threads or usable_cores(),
            logits_rows=options.logits_rows,
            observes=bool(policy.needs.queries),
            per_head=policy.needs.looks,
            uneven=policy.needs.uneven != "token",
            pinned=pinned_rows(policy) if policy.close_gaps else 0,
            provider=options.provider or "cpu",
            emulated=self.emulated,
            gpu_layers=options.gpu_layers or 0,
            adapter=self.gpu.adapter if self.gpu else "",
            lora_rank=options.lora_size.rank,
            lora_bytes=options.lora_size.nbytes,
        )
