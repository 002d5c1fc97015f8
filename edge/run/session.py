"""A session: a loaded model, its conversation, and the public calls that go with them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from edge.backends.base import Backend, Engine, LoadProgress
from edge.budget import format_bytes
from edge.devices.memory import memory_use
from edge.devices.power import find_meter, memory_root
from edge.errors import BudgetError, EngineError, InputError, UnsupportedError
from edge.grammar.grammar import Grammar
from edge.model.adapters.lora import Lora
from edge.model.adapters.lora_file import Loras, parse_lora
from edge.model.chat.thinking import Think
from edge.model.model import Model
from edge.model.structure.layers import Pooling
from edge.model.structure.spec import deaf
from edge.options import Options
from edge.plan.plan import Plan
from edge.run.arguments import check_list, check_meter, check_prompt, check_text, check_top
from edge.run.batching.scheduler import Scheduler, stepwise
from edge.run.budgets.meters import EnergyMeter, Watch, find_zone
from edge.run.budgets.shares import whole_of
from edge.run.decoding.generation import Generation
from edge.run.decoding.loop import begin, generate
from edge.run.hooks import NO_HOOKS, Hooks, OnCall, OnLogprob, OnPrefill, OnThought
from edge.run.loaded import Loaded
from edge.run.report import RunReport, StopReason, TokenLogprob
from edge.run.reporting import check_complete, report_of, why_unanswered
from edge.run.request import DEFAULT_MAX_TOKENS, Heard, Messages, Picture, Request, Text, Tools, prompt_of
from edge.run.sampling.sampler import Processor
from edge.run.sequences.sequence import TokenSequence
from edge.run.sequences.snapshots import Mark
from edge.sampling import SamplingParams
from edge.storage.making import Made
from edge.types import FloatArray, IntArray

if TYPE_CHECKING:  # modules that few runs need are imported where they are used
    from typing_extensions import Unpack

    from edge.media.sound import SoundStream, Source
    from edge.run.batching.batch import Batch
    from edge.run.branching.branches import Fork
    from edge.run.grounding import Grounded, Grounds, Reader
    from edge.run.keywords import AnswerKeywords
    from edge.run.speech.asked import HearKeywords
    from edge.run.speech.transcription import Transcription

Observer = Callable[[Generation, Plan, RunReport], None]  # is called at the end of each generation

open_sessions: WeakSet[Session] = WeakSet()


class Session:
    """A loaded model and its KV cache. Use it as a context manager, or call `close`."""

    def __init__(
        self, model: Model, backend: Backend, plan: Plan, options: Options, on_load: LoadProgress | None = None,
        meter: EnergyMeter | None = None,
    ) -> None:  # fmt: skip
        """options: for limits, adapters, the draft model and the PromptCache; the plan holds the other settings.

        Raises BudgetError if loading took more memory than the budget.
        """
        self._meter = check_meter(meter or find_meter())
        self.prepared = Made()  # before the first generation, once for this model
        self.observers: list[Observer] = []
        self._zone = find_zone(options.max_temp)
        self.model, self.spec, self.tokenizer, self.options = model, model.spec, model.tokenizer, options
        self.report: RunReport | None = None
        self._process, self._closed = os.getpid(), False
        self._loaded = Loaded(model, backend, plan, options, self._meter, on_load)
        open_sessions.add(self)
        self.steps = Scheduler(lambda level: self._loaded.reclaimer.trim(level))
        self.terminated = self._interrupted = False
        peak = max(memory_use().peak, self._loaded.with_children)
        if options.memory is not None and peak > options.memory:
            self.close()
            raise BudgetError(
                f"loading took {format_bytes(peak)}, more than predicted and than the budget of "
                f"{format_bytes(options.memory)}: use a larger --memory or a smaller --max-kv-size"
            )

    @property
    def engine(self) -> Engine:
        """The engine that runs the model."""
        return self._loaded.engine

    @property
    def plan(self) -> Plan:
        """The plan by which it was loaded."""
        return self._loaded.plan

    @property
    def _sequence(self) -> TokenSequence:
        return self._loaded.sequence

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the engine. The report stays; a stream that is open ends. Raises BusyError while another thread
        generates."""
        if hasattr(self, "_loaded") and self._process == os.getpid():  # a forked child has none of the engine's threads
            self.steps.end()
            self._closed = True
            open_sessions.discard(self)
            self._loaded.close()

    def reset(self) -> None:
        """Forget the conversation: empty the KV cache. Raises BusyError during a generation."""
        self.steps.check_idle()
        self._sequence.forget()

    @property
    def team(self) -> tuple[int, ...]:
        """Passes that 1, 2, … threads have run so far; empty for engines whose threads do not give way."""
        return self._loaded.team()

    @property
    def lora(self) -> Lora | None:
        """The adapters that the model runs with."""
        return self._sequence.lora

    def set_lora(self, lora: str | Path | Loras | None, *, scale: float = 1.0) -> None:
        """Run with another LoRA adapter from the next generation on, or with none.

        lora: a GGUF file, or a value of `--lora`. scale: a factor on the adapters' contribution. The conversation is
        forgotten, since its rows are those of another model: a follow-up is refused, and a `Conversation` runs its text
        again. Takes milliseconds for an adapter whose rank is at most the one that the engine was loaded for; for
        others the engine is reloaded.

        Raises BusyError during a generation; InputError for adapters of another model, ModelFormatError,
        UnsupportedError, BudgetError if memory does not suffice: then the previous adapter stays.
        """
        self.steps.check_idle()
        self._check_open()
        if not isinstance(scale, int | float):
            raise InputError(f"the scale of an adapter must be a number, not {scale!r:.60}")
        files = () if lora is None else tuple(replace(each, scale=each.scale * scale) for each in parse_lora(lora))
        self._loaded.set_lora(parse_lora(files))

    def mark(self, *, hold: bool = False) -> Mark:
        """The current position of the conversation, between two generations.

        hold: whether the mark keeps, beyond the plan's snapshots, the state that a cache with windows or a recurrent
        state needs to return.
        """
        return self._sequence.mark(hold=hold)

    def rewind(self, mark: Mark) -> bool:
        """Forget everything after `mark`. Returns False, and changes nothing, where that is impossible: rows were
        evicted since; the policy scores rows by attention, which later queries have changed; or a cache with windows or
        a recurrent state has no snapshot up to the mark. After a return to an earlier snapshot, the tokens between it
        and the mark run again with the next prompt."""
        return self._sequence.rewind(mark)

    def generate(self, prompt: Text | None = None, **options: Unpack[AnswerKeywords]) -> str:
        """The whole answer to a prompt; `report` then holds its cost. Options are those of `stream`.

        Raises IncompleteError if an answer with a grammar was cut before the grammar allowed its end.
        """
        if unknown := [name for name in options if name not in (Session.stream.__kwdefaults__ or {})]:
            raise TypeError(f"Session.generate() got an unexpected keyword argument {unknown[0]!r}")
        answer = "".join(self.stream(prompt, **options))
        check_complete(self.report, answer)
        return answer

    def stream(
        self,
        prompt: Text | None = None,
        *,
        messages: Messages | None = None,
        images: Sequence[Picture] | None = None, sounds: Sequence[Heard] | None = None,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        system: str | None = None,
        raw: bool = False, follow_up: bool = False,
        think: Think | str | bool | int | None = None,
        time_limit: float | None = None, energy_limit: float | None = None,
        time_spent: float = 0.0, energy_spent: float = 0.0,
        keep_text: bool = True,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
        logits_processor: Processor | None = None,
        on_logprob: OnLogprob | None = None,
        beams: int | None = None,
        length_penalty: float = 1.0,
        vote: int | None = None, outline: bool | str = False,
        on_prefill: OnPrefill | None = None,
        on_thought: OnThought | None = None,
        on_call: OnCall | None = None,
        documents: Grounds | Grounded | None = None,
    ) -> Generator[str, None, None]:  # fmt: skip
        """Yield the answer in pieces as it is generated; characters are never split.

        prompt: text; an iterable of text that is read while it runs, so that it may be longer than memory; token ids,
            int [n]; or a Prompt. Text goes through the chat template.
        messages, tools, tool_choice, parallel_tool_calls: a whole conversation in place of the prompt, and functions
            that the model may call, as in OpenAI's protocol. KV rows shared with the last conversation are kept.
        images: pictures before the prompt, for models that see: paths, bytes, arrays or `edge.Image`.
        sounds: sounds before the prompt, for models that hear: paths, bytes, arrays at 16 kHz or `edge.Sound`.
        max_tokens: None or -1 has no limit. Thoughts count.
        sampling: how tokens are drawn (default: as the model's file recommends, otherwise greedy).
        stop: a text, or several, before which the answer ends; thoughts are not searched.
        ignore_eos: never end the turn.
        system: the system prompt.
        raw: continue the prompt without the chat template; its control tokens are recognized.
        follow_up: continue the conversation in the cache instead of starting anew.
        think: whether and how long the model thinks before it answers: True, False, 256 (tokens), "5J", "low" …
        time_limit, energy_limit: seconds and joules, instead of the session's budget.
        time_spent, energy_spent: the part of them that is spent before the start.
        keep_text: False leaves the texts of the report None, for answers without end.
        grammar: the answer, without thoughts, must match it; `report.incomplete` has the reason if it was cut short.
        logprobs: report the log-probability of each token, in the model's own distribution before sampling, and this
            many of the likeliest tokens.
        logits_processor: a function of the answer's tokens, int32 [n], and the next logits, float32 [vocab], which
            changes the logits in place or returns others.
        beams, length_penalty: beam search with this many beams, whose answer comes in one piece; scores are divided by
            length to the power of length_penalty. `report.beams` has all beams.
        vote: draw as many short answers side by side, and give the one that most agree on, in one piece.
        outline: write an outline, and then its points side by side, where the model says that the question has
            independent points, or "always". `report.branched` has the branches of both (docs/branches.md).
        on_prefill, on_thought, on_logprob, on_call: functions called with the progress of the prompt, each piece of
            thoughts, each TokenLogprob before its text, and events of `edge.tools.parser`. They must return quickly.
        documents: an `edge.Documents`, whose passages stand before the question; `report.sources` has them.

        After the last piece, or when the iterator is closed, `report` holds the RunReport, and its figures are in the
        history of this device (docs/devices.md), from which `edge.forecast` predicts.

        Raises InputError; BusyError, at the call, while another stream of the session is open, and in a forked child;
        BudgetError, after `report` was set, if a budget ended the answer before its first token.
        """
        self.steps.check_idle()
        if isinstance(sampling, Mapping):
            raise InputError(f"sampling must be SamplingParams, not {sampling!r:.60}")
        found: Grounded | None = None
        if documents is not None:
            from edge.run.grounding import grounded  # here: few prompts have documents

            prompt, messages, found = grounded(documents, self.reader, prompt, messages, system, max_tokens)
        asked = prompt_of(
            prompt, messages, tools, tool_choice, system, parallel=parallel_tool_calls, continues=raw or follow_up,
            images=images, sounds=sounds,
        )  # fmt: skip
        request = Request(
            asked, max_tokens, sampling, stop, ignore_eos, system, raw, follow_up, Think.parse(think), time_limit,
            energy_limit, time_spent, energy_spent, keep_text, grammar, logprobs, logits_processor, beams,
            length_penalty, vote, outline,
            sources=found.sources if found else (), pruned=found.pruned if found else None,
        )  # fmt: skip
        return self.start(request, Hooks(on_prefill, on_thought, on_logprob, on_call))

    def start(self, request: Request, hooks: Hooks = NO_HOOKS) -> Generator[str, None, None]:
        """Yield the answer to a request in pieces; `stream` makes one of its arguments, and describes errors."""
        self.steps.check_idle()
        self._interrupted = False  # not later: Ctrl-C may come before the first piece is asked for
        if request.vote is None and not request.skeleton:
            return self._start(request, hooks)
        from edge.run.branching.answering import answer  # here: few answers have branches

        return answer(self, request, hooks)

    @stepwise
    def _start(self, request: Request, hooks: Hooks) -> Generator[str, None, None]:
        started, options, sequence = time.perf_counter(), self.options, self._sequence
        request = request.within(options)
        watch = Watch(
            request.limits(options, started), self._meter, self._zone.path if self._zone else None,
            whole=whole_of(self._meter), spender=self._loaded.reclaimer, root=memory_root(), ended=self._ended_by,
            obey=self.steps.obey,
        )  # fmt: skip
        self._check_open()
        if request.follow_up and sequence.lost:
            raise InputError("the adapter was changed, and the conversation forgotten: begin a new one")
        run = Generation.of(request, self.model, watch, started, hooks)
        begin(sequence, run)
        run.prepared, self.prepared, self._loaded.reclaimer.run = self.prepared, Made(), run
        run.experts, run.team = self._loaded.expert_counts(), self._loaded.team()
        try:
            yield from generate(sequence, run)
        except (EngineError, UnsupportedError):
            run.stop_reason = "failed"
            raise
        finally:
            with suppress(EngineError):  # a GPU that is lost cannot even forget rows
                sequence.end()
            self._loaded.reclaimer.run = None
            self.report = report_of(run, self._loaded, sequence, options, self._zone, watch)
            self._told(run, self.report)
            run.free()
            self._interrupted = False  # of this answer, and not of one that was asked for before it ended
        if self.report.unanswered:
            raise BudgetError(why_unanswered(self.report, options, self._loaded))

    def transcribe(self, sound: Source | SoundStream, **options: Unpack[HearKeywords]) -> Transcription:
        """Yield the segments of a sound, with times, as they are found: by a model that hears, such as whisper-base.

        sound: a path, "-" for stdin, bytes of a file, or samples: float from -1 to 1 or integers, [n] or [n, channels].
        rate: samples per second of an array, or of raw 16-bit samples in bytes or on stdin.
        language: a code such as "en" (default: detected). translate: into English.
        timestamps: "segments" or "words", which are then in `Segment.words`.
        prompt: text that might have come before, for names and style.
        temperature: draw at this one (default: greedily, and again at higher ones while a text fails).
        beam_size: texts that are searched at once, for `patience` times as many finished ones. best_of: texts that are
        drawn at higher temperatures. length_penalty: GNMT's, of which texts are compared (default: by their mean).
        vad: pass over silence and steady noise ("energy", or True), also over music and noise that is no speech
        ("silero", of the extra `voice`), or over nothing ("none", or False).
        condition_on_previous_text: prompt each window with the text before.
        time_limit, energy_limit, time_spent, energy_spent, keep_text: as in `stream`.
        place: go on from here, the `place` of an earlier transcription of the same sound.
        on_progress: called with the seconds heard, and those of the whole, None if unknown.

        After the last segment, or when it is closed, its `report` holds what it cost. Raises InputError,
        MissingExtraError; UnsupportedError by a model that does not hear; BusyError while the session works.
        """
        raise deaf(self.model.name)

    def batch(self) -> Batch:
        """Run several generations at once, as many as the `sequences` that the session was loaded with; more wait.

        The conversation is forgotten. Until the batch is closed, `stream` raises BusyError.
        """
        return self._batch()

    def fork(self, n: int) -> Fork:
        """Continue the conversation in `n` branches (docs/branches.md), as many side by side as there are `sequences`.
        Raises InputError once rows were evicted; until it is closed, `stream` raises BusyError."""
        from edge.run.branching.branches import Fork

        self.steps.check_idle()
        return Fork(self._sequence, self.model, self._batch, n)

    def _batch(self, restore: Callable[[], None] | None = None) -> Batch:
        from edge.run.batching.batch import Batch

        self._check_open()
        self._interrupted = False
        ended_by = self._ended_by if restore else lambda: "terminated" if self.terminated else None
        return Batch(self._loaded, self.options, self._meter, self._zone, self.steps, ended_by, self._told, restore)

    def _told(self, run: Generation, report: RunReport) -> None:
        for observer in self.observers:
            observer(run, self.plan, report)

    def score(self, tokens: IntArray, *, top: int = 0, first: int = 1, keep_rows: bool = False) -> list[TokenLogprob]:
        """The log-probability of each token from number `first` on, given the tokens before it that the KV policy kept,
        and of the `top` likeliest in its place. Forgets the conversation.

        tokens: int [n], as `model.encode_text` or `model.encode_prompt` makes them. Logits are computed for at most
        `logits_rows` tokens at a time, an option of loading. keep_rows: leave the rows in the cache, and reuse those of
        the last text for a common prefix before `first`, so that scoring several endings runs their beginning once.
        Raises BusyError during a generation, InputError for fewer than two tokens, a `first` out of range, or more
        tokens than fit if the policy may not evict.
        """
        from edge.run.decoding.logprobs import score

        self.steps.check_idle()
        self._check_open()
        check_top("top", top)
        found = check_prompt(tokens)
        if not isinstance(found, np.ndarray):
            raise InputError("score takes token ids, int [n]: see model.encode_text")
        return score(self._sequence, found, top, first, keep_rows=keep_rows)

    def embed(
        self, text: str | IntArray | Sequence[str | IntArray], *, pooling: Pooling | None = None,
        normalize: bool = True, truncate: bool = False, prompt_name: str | None = None, dimensions: int | None = None,
    ) -> FloatArray:  # fmt: skip
        """The embedding of a text or of token ids, float32 [hidden], or of a list of these, [texts, hidden], from the
        model's last hidden states. Encoders run several short texts in one pass. Forgets the conversation.

        pooling: the "mean" of all states, the state of the "last" token, or of the first ("cls"); None: as the model's
        file says, else "mean". normalize: scale to length 1. truncate: leave out the end of a text that is
        longer than the cache; else the policy evicts rows of it. prompt_name: of the model's prompts, such as "query"
        and "document", the one to stand before texts (`model.prompts`). dimensions: of the values, only the first, for
        models that were trained for that (Matryoshka). Raises BusyError during a generation, InputError for
        an empty text, or one that is longer than the cache if the policy may not evict; UnsupportedError where an
        engine has no hidden states.
        """
        from edge.run.sequences.embedding import check_pooling, embed

        self._check_embeds()
        several = isinstance(text, Sequence) and not isinstance(text, str)
        texts = [
            each if isinstance(each, np.ndarray)
            else self.model.encode_text(self.model.prompted("".join(each), prompt_name), embedded=True)
            for each in map(check_prompt, text if several else [text])
        ]  # fmt: skip
        found = embed(
            self._sequence, self.model, texts, check_pooling(pooling), normalize=normalize, truncate=truncate,
            dimensions=dimensions,
        )  # fmt: skip
        return found if several else np.asarray(found[0])

    def rank(self, query: str, texts: Sequence[str], *, instruction: str | None = None) -> FloatArray:
        """The relevance of each text to a query, from 0 to 1, float32 [texts]. Forgets the conversation.

        A reranker judges query and text together: a cross-encoder by its classifier, Qwen3-Reranker by the answer yes
        or no, to which `instruction` may add the task. Other models rank by the cosine of embeddings. The end of a text
        that does not fit is left out. Raises BusyError during a generation, InputError for an empty query or
        text, UnsupportedError where an engine has no hidden states.
        """
        return self.rank_counted(query, texts, instruction=instruction)[0]

    def rank_counted(
        self, query: str, texts: Sequence[str], *, instruction: str | None = None
    ) -> tuple[FloatArray, int]:
        """As `rank`, with the number of tokens that ran."""
        from edge.run.sequences.ranking import rank

        self._check_embeds()
        check_text("the query", query)
        check_list("texts", texts)
        return rank(self._sequence, self.model, query, texts, instruction)

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this session is closed: load the model again")

    def _check_embeds(self) -> None:
        self.steps.check_idle()
        self._check_open()
        if self.model.prefix:
            raise InputError("embeddings are made without a prefix: leave --prefix out")

    def trim(self, level: float) -> None:
        """Return spare memory to the system, for the rest of the session.

        level: from 0, which costs nothing, to 1: all that can be spared. The memory of the prompt cache goes first,
        then snapshots, then KV rows, down to 256 or to those in use if the policy never evicts. Any thread and signal
        handler may call this; during an answer, it happens before the next token. On Android, `onTrimMemory` has
        TRIM_MEMORY_RUNNING_MODERATE (5), UI_HIDDEN (20) and BACKGROUND (40) for 0, RUNNING_LOW (10) and MODERATE (60)
        for 0.5, RUNNING_CRITICAL (15) and COMPLETE (80) for 1; on iOS, a memory warning is 1.

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
        """The stop reason, if a caller asked for the end of the answer; else None."""
        return "terminated" if self.terminated else "interrupted" if self._interrupted else None

    @property
    def reader(self) -> Reader:
        """The model with its room, for passages of documents."""
        from edge.run.grounding import Reader  # here: few prompts have documents

        rows = min(self.engine.kv.capacity, self.spec.context)
        return Reader(self.model, self.options, rows, self.may_evict)

    @property
    def may_evict(self) -> bool:
        """Whether the policy makes room when the cache is full."""
        return self._sequence.policy.evicts

    def make_room(self, count: int) -> bool:
        """Evict until `count` more rows fit, by the policy. False if it may not evict and they do not fit."""
        return self._sequence.rows.make_room(count)

    def shrink(self, budget: int) -> None:
        """Evict by the policy until no more than `budget` rows are left, on average where heads differ; nothing if it
        never evicts."""
        self._sequence.rows.shrink(budget)

    def forward(self, tokens: IntArray, *, upcoming: int, every: bool = False) -> FloatArray:
        """Run tokens, int [n], for which there is room, and observe attention as the policy needs it.

        upcoming: tokens that will need room next. Returns logits after the last token, float32 [vocab], or after every
        token, [n, vocab].
        """
        return self._sequence.forward(tokens, upcoming=upcoming, every=every)
