"""A session: a loaded model, its conversation, and the public calls that go with them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import numpy as np

from edge.backends.base import AdaptedEngine, Backend, CardEngine, LoadProgress
from edge.budget import format_bytes
from edge.devices.child import children_peak, room_for_children
from edge.devices.memory import memory_use, release_free_memory
from edge.devices.power import find_meter, measure_card, memory_root, sensors_root
from edge.devices.thermal import Zone, zones
from edge.errors import BudgetError, EngineError, InputError, UnsupportedError
from edge.model.lora import Lora, open_lora
from edge.model.lora_file import parse_lora
from edge.model.model import Model
from edge.model.prompt import Prompt
from edge.model.thinking import Think
from edge.options import Options
from edge.plan.plan import Plan, plan_with_lora
from edge.run.arguments import check_limit, check_meter, check_stream
from edge.run.generation import Generation, expert_counts, memory_of, why_unanswered
from edge.run.governor import RunLimits
from edge.run.history import remember_run
from edge.run.loop import decode, prefill, read_ahead
from edge.run.meters import EnergyMeter, Watch
from edge.run.reclaim import Reclaimer
from edge.run.report import AdapterUse, Heat, KVUse, RunReport, StopReason
from edge.run.sampler import Sampler
from edge.run.scheduler import Scheduler, stepwise
from edge.run.sequence import Mark, TokenSequence
from edge.run.snapshots import Outline, outline
from edge.run.stop_strings import StopStrings
from edge.run.thoughts import Thinking
from edge.sampling import SamplingParams
from edge.storage.making import Made
from edge.storage.versions import own_versions
from edge.types import FloatArray, IntArray

DEFAULT_MAX_TOKENS = 512

Progress = Callable[[int, int], None]  # tokens done, tokens of the prompt, or as many as are known of a longer one


open_sessions: WeakSet[Session] = WeakSet()


class Session:
    """A loaded model and its KV cache. Use it as a context manager, or call `close`."""

    def __init__(
        self, model: Model, backend: Backend, plan: Plan, options: Options, on_load: LoadProgress | None = None,
        meter: EnergyMeter | None = None,
    ) -> None:  # fmt: skip
        """options: their limits and their PromptCache; what else they say is in the plan."""
        self._meter = check_meter(meter or find_meter())
        self.prepared = Made()  # before the first generation, once for this model
        self._zone = _find_zone(options)
        self.model, self.spec, self.tokenizer = model, model.spec, model.tokenizer
        self.plan, self.options = plan, options
        self.report: RunReport | None = None
        self._backend = backend
        self._process, self._closed = os.getpid(), False
        started = time.perf_counter()
        self._with_children = children_peak()
        self._load_engine(plan, open_lora(options.lora or (), model.file, model.spec), on_load)
        self._load_s = time.perf_counter() - started
        open_sessions.add(self)
        self.steps = Scheduler(lambda level: self._reclaimer.trim(level))
        self.terminated = self._interrupted = False
        peak = max(memory_use().peak, self._with_children)
        if options.memory is not None and peak > options.memory:
            self.close()
            raise BudgetError(
                f"loading took {format_bytes(peak)}, more than predicted and than the budget of "
                f"{format_bytes(options.memory)}: use a larger --memory or a smaller --max-kv-size"
            )

    def _load_engine(self, plan: Plan, lora: Lora | None, on_load: LoadProgress | None = None) -> None:
        with room_for_children(self.options.memory) as room:
            engine = self._backend.load(self.model.file, self.spec, plan.config, on_load)
        self._with_children = max(self._with_children, room.most)
        try:
            if lora is not None:
                cast(AdaptedEngine, engine).set_lora(lora)
        except BaseException:
            engine.close()
            raise
        if engine.capabilities.gpu and (card := cast(CardEngine, engine).card):
            measure_card(self._meter, card)
        self.engine, self.plan = engine, plan
        self._sequence = TokenSequence(engine, plan, lora, self.options.prompt_cache, self._meter)
        self._reclaimer = Reclaimer(self._sequence)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the engine. The report stays; a stream that is open ends. Raises BusyError while another thread
        generates."""
        if hasattr(self, "engine") and self._process == os.getpid():  # a forked child has none of the engine's threads
            self.steps.end()
            self._closed = True
            open_sessions.discard(self)
            self.engine.close()

    def reset(self) -> None:
        """Forget the conversation: empty the KV cache. Raises BusyError during a generation."""
        self.steps.check_idle()
        self._sequence.reset()

    @property
    def lora(self) -> Lora | None:
        """The adapters that the model runs with."""
        return self._sequence.lora

    def set_lora(self, lora: str | Path | None, *, scale: float = 1.0) -> None:
        """Run with another LoRA adapter from the next generation on, or with none.

        lora: a GGUF file, or what `--lora` takes. scale: a factor of what the adapters add. The conversation is
        forgotten, since its rows are those of another model: a follow-up is refused, and a `Conversation` runs its text
        again. Takes milliseconds for an adapter whose rank is at most that of the one that the session was loaded with;
        for others the engine is loaded again.

        Raises BusyError during a generation; InputError for adapters of another model, ModelFormatError,
        UnsupportedError, BudgetError if memory does not suffice: then the adapter stays the one before.
        """
        self.steps.check_idle()
        if self._closed:
            raise InputError("this session is closed: load the model again")
        if not isinstance(scale, int | float):
            raise InputError(f"the scale of an adapter must be a number, not {scale!r:.60}")
        files = () if lora is None else tuple(replace(each, scale=each.scale * scale) for each in parse_lora(lora))
        adapters, plan = open_lora(parse_lora(files), self.model.file, self.spec), self.plan
        if adapters is not None and not self.engine.capabilities.lora:
            raise UnsupportedError(f"the {plan.backend} engine runs no LoRA adapters")
        lost = self._sequence.lost or self.engine.kv.length > 0
        if adapters is not None and adapters.size.rank > plan.config.lora_rank:
            self._load_again(plan_with_lora(plan, self.spec, self._backend, adapters.size), adapters, lost)
        elif adapters is not None or self.lora is not None:
            cast(AdaptedEngine, self.engine).set_lora(adapters)
        self._sequence.adopt(adapters, lost)
        self.options = replace(self.options, lora=files or None)

    def _load_again(self, plan: Plan, lora: Lora, lost: bool) -> None:
        """Load the engine with room for other adapters; if that fails, as it was, without the conversation."""
        self.engine.close()
        release_free_memory()
        try:
            self._load_engine(plan, lora)
        except BaseException:
            self._load_engine(self.plan, self.lora)
            self._sequence.adopt(self.lora, lost)
            raise

    def mark(self) -> Mark:
        """Where the conversation is, between two generations."""
        return self._sequence.mark()

    def rewind(self, mark: Mark) -> bool:
        """Forget all that came after `mark`. False, and nothing changes, where that cannot be: rows before it were
        evicted since, rows have attention from queries after it, by which the policy would choose, or a cache with
        windows or a recurrent state has no snapshot of that time. From one that is earlier, tokens up to the mark run
        again with the next prompt."""
        return self._sequence.rewind(mark)

    def generate(self, prompt: str | Iterable[str] | IntArray | Prompt, **options: Any) -> str:
        """The whole answer to a prompt; `report` then says what it cost. Options are those of `stream`."""
        return "".join(self.stream(prompt, **options))

    @stepwise
    def stream(
        self,
        prompt: str | Iterable[str] | IntArray | Prompt,
        *,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        system: str | None = None,
        raw: bool = False,
        follow_up: bool = False,
        think: Think | str | bool | int | None = None,
        time_limit: float | None = None,
        energy_limit: float | None = None,
        time_spent: float = 0.0,
        energy_spent: float = 0.0,
        keep_text: bool = True,
        on_prefill: Progress | None = None,
        on_thought: Callable[[str], None] | None = None,
    ) -> Generator[str, None, None]:
        """Pieces of the answer as they are generated, whole characters only.

        prompt: text (goes through the chat template unless `raw`, which parses control tokens instead) or token ids,
        int [n]; text in parts and a Prompt are read while they are run, so that they may be longer than what fits in
        memory. max_tokens: None or -1 goes on until something else stops it. stop: a text before which the answer
        ends, or several. follow_up: continue the conversation in the cache instead of starting anew. think: whether and
        how long the model thinks before it answers: True, False, 256 (tokens), "5J", "low" …; a Prompt has been
        rendered with it already. Thoughts count in max_tokens, are not searched for `stop`, and go to `report.thoughts`
        and, piece by piece, to on_thought, which must return quickly. time_limit: seconds, energy_limit: joules,
        instead of the session's budget; time_spent, energy_spent: what of it is gone already, for the start.
        keep_text=False leaves the report's texts None, for runs without end. After the last piece, or when the iterator
        is closed, `report` holds the RunReport, and its figures are in the history of this device (see
        docs/devices.md), for `edge.forecast`.

        A session runs one generation at a time: raises BusyError, at the call, while another stream is open, and in a
        forked child. Raises BudgetError, after `report` was set, if a budget ended it before the first token of the
        answer.
        """
        started = time.perf_counter()
        max_tokens = check_limit(max_tokens)
        prompt = check_stream(
            prompt, sampling, stop=stop, system=system,
            time_limit=time_limit, energy_limit=energy_limit, time_spent=time_spent, energy_spent=energy_spent,
        )  # fmt: skip
        sampling = (sampling or self.model.sampling()).with_seed()
        chosen, options = Think.parse(think), self.options
        limit = options.time if time_limit is None else time_limit
        joules = options.energy if energy_limit is None else energy_limit
        limits = RunLimits(
            deadline=None if limit is None else started + limit - time_spent,
            energy=None if joules is None else max(0.0, joules - energy_spent),
            memory=options.memory, power=options.power, celsius=options.max_temp,
        )  # fmt: skip
        watch = Watch(
            limits, self._meter, self._zone.path if self._zone else None, spender=self._reclaimer,
            root=memory_root(), ended=self._ended_by, obey=self.steps.obey,
        )  # fmt: skip
        sequence = self._sequence
        if follow_up and sequence.lost:
            raise InputError("the adapter was changed, and the conversation forgotten: begin a new one")
        self._interrupted = False  # before the prompt is read: Ctrl-C may come while that lasts
        asked = self._tokens_of(prompt, system, raw, follow_up, chosen)
        thinking = Thinking(self.model, asked, chosen, watch, on_thought, keep_text)
        banned = self.tokenizer.suppressed | (self.tokenizer.end_ids if ignore_eos else frozenset())
        if not follow_up:
            sequence.reset()
        stopped = read_ahead(sequence, asked, watch)
        if not stopped:
            sequence.check_fits(asked)
        asked = sequence.begin(asked, self._outline(asked, system, chosen, follow_up), follow_up=follow_up)
        run = Generation(
            asked, started, watch, Sampler(sampling, banned), thinking, StopStrings(stop), max_tokens,
            joules, energy_spent, limit, time_spent, self.prepared, experts=expert_counts(self.engine),
            text=StringIO() if keep_text else None,
        )  # fmt: skip
        self.prepared = Made()
        self._reclaimer.run = run
        try:
            if not stopped and not follow_up:
                run.reused = sequence.reuse()
            run.restored_at = time.perf_counter()
            for done, known in prefill(sequence, run):
                if on_prefill:
                    on_prefill(done, known)
            if sequence.prompt_done:
                for piece in decode(sequence, run):
                    if piece:
                        if run.text is not None:
                            run.text.write(piece)
                        shown = time.perf_counter()
                        yield piece
                        run.held += time.perf_counter() - shown
        except EngineError:
            run.stop_reason = "failed"
            raise
        finally:
            with suppress(EngineError):  # a GPU that is lost cannot even forget rows
                sequence.end()
            self._reclaimer.run = None
            self.report = self._report(run, sampling.seed)
            if run.is_typical:
                remember_run(self.spec, self.plan, self.report)
        if self.report.unanswered:
            raise BudgetError(why_unanswered(self.report, self.options))

    def _tokens_of(
        self, prompt: str | Iterable[str] | IntArray | Prompt, system: str | None, raw: bool, follow_up: bool,
        think: Think,
    ) -> Prompt:  # fmt: skip
        if self._closed:
            raise InputError("this session is closed: load the model again")
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, np.ndarray):
            if think.chosen:
                raise UnsupportedError("--think needs a chat template, and token ids go without one")
            return Prompt([prompt])
        if follow_up:
            return self.model.follow_up(prompt, think)
        return self.model.prompt(prompt, system=system, raw=raw, think=think)

    def _outline(self, prompt: Prompt, system: str | None, think: Think, follow_up: bool) -> Outline:
        if prompt.thinks is None or not self.engine.kv.has_tail:
            return Outline()
        first = not follow_up and self.options.prompt_cache is not None
        return outline(self.model, system, think, first=first)

    def trim(self, level: float) -> None:
        """Memory is short: give back what can be spared, and keep it so.

        level: from 0, which costs nothing, to 1: all that can be spared. That is the memory of the prompt cache first,
        then KV rows, down to 256 or to those in use if the policy never evicts. Any thread and any signal handler may
        call this; while an answer is generated, it happens before the next token. On Android, `onTrimMemory` has
        TRIM_MEMORY_RUNNING_MODERATE (5) and UI_HIDDEN (20) for 0, RUNNING_LOW (10) and BACKGROUND (40) for 0.5,
        RUNNING_CRITICAL (15), MODERATE (60) and COMPLETE (80) for 1; on iOS, a memory warning is 1.

        Raises InputError for other levels.
        """
        if not isinstance(level, (int, float)) or not 0 <= level <= 1:
            raise InputError(f"the level of trim must be from 0 to 1, not {level}")
        self.steps.ask(level)

    def interrupt(self) -> None:
        """End the answer before its next token, as a budget would; from any thread or signal handler. The stop reason
        is `interrupted`. Nothing happens between two generations."""
        self._interrupted = True

    def terminate(self) -> None:
        """Like `interrupt`, for this answer and all later ones of the session. The stop reason is `terminated`."""
        self.terminated = True

    def _ended_by(self) -> StopReason | None:
        """Who asked for the end of the answer."""
        return "terminated" if self.terminated else "interrupted" if self._interrupted else None

    @property
    def may_evict(self) -> bool:
        """Whether the policy makes room when the cache is full."""
        return self._sequence.policy.evicts

    def make_room(self, count: int) -> bool:
        """Evict until `count` more rows fit, by the policy. False if it may not evict and they do not fit."""
        return self._sequence.make_room(count)

    def shrink(self, budget: int) -> None:
        """Evict by the policy until no more than `budget` rows are left, on average where heads differ; nothing if it
        never evicts."""
        self._sequence.shrink(budget)

    def forward(self, tokens: IntArray, *, upcoming: int, every: bool = False) -> FloatArray:
        """Run tokens for which there is room, and let the policy see what it needs.

        upcoming: tokens that will want room next. Returns logits after the last, or after every token.
        """
        return self._sequence.forward(tokens, upcoming=upcoming, every=every)

    def _report(self, run: Generation, seed: int | None) -> RunReport:
        sequence, kv, actions = self._sequence, self.engine.kv, tuple(self._reclaimer.actions)
        versions = {**own_versions(), **self._backend.versions()}  # first: it takes a MiB, which is reported, too
        self._reclaimer.actions.clear()
        gpu_used = self._backend.used_memory(self.plan.config.adapter) if self.plan.bytes.gpu else None
        kv_bytes = kv.nbytes + sequence.snapshots.nbytes
        adapters = zip(self.lora.adapters, self.lora.scales, strict=True) if self.lora else ()
        counts = expert_counts(self.engine)
        experts = counts.since(run.experts) if counts and run.experts else None
        return RunReport(
            text=None if run.text is None else run.text.getvalue(),
            tokens=run.tokens,
            timings=run.timings(self._load_s),
            stop_reason=run.stop_reason,
            memory=memory_of(self.plan, kv_bytes, self.options, gpu_used, self._with_children, experts),
            kv=KVUse(sequence.policy.name, kv.capacity, kv.length, self.plan.config.kv_dtype, sequence.evicted),
            plan=self.plan.to_dict(),
            versions=versions,
            energy=run.energy(),
            heat=None if self._zone is None else Heat(self._zone.name, run.watch.hottest, self.options.max_temp),
            actions=actions,
            thoughts=run.thinking.report(),
            seed=seed,
            lora=tuple(AdapterUse(each.name, each.rank, scale, each.sha256) for each, scale in adapters),
        )


def _find_zone(options: Options) -> Zone | None:
    """The processor's thermometer."""
    found = next(iter(zones(sensors_root())), None)
    if options.max_temp is not None and found is None:
        raise UnsupportedError("--max-temp cannot be kept: this device shows no temperature in /sys/class/thermal")
    return found
