"""The loop that produces tokens: prefill; then for each token of the answer sample, text, budgets, decode.

A `TokenSequence` owns the tokens and their rows; nothing else changes them. A `Generation` is told what happens: it
counts, its `Watch` holds the budgets, its `Thinking` and `StopStrings` turn tokens into text.

The loop yields a `Pause` where other generations may run: a session continues at once; a `Batch` (batch.py) lets the
others run, then runs the pending tokens of all in one pass.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from enum import Enum

from edge.model.parts.prompt import Prompt
from edge.run.budgets.meters import Watch
from edge.run.decoding.generation import Generation
from edge.run.report import StopReason
from edge.run.sequences.sequence import TokenSequence
from edge.run.sequences.snapshots import Outline


class Pause(Enum):
    """A point at which other generations may run before this one continues."""

    PROMPT = "prompt"  # another chunk of the prompt follows
    PENDING = "pending"  # the driver must run the pending tokens, for which there is room, or take back the rows


Loop = Generator[str | Pause, None, None]
_READ_UNASKED = 4096  # prompt tokens read before budgets are checked: a few milliseconds of work


def begin(sequence: TokenSequence, run: Generation, shared: int = 0) -> None:
    """Make room for a request's prompt. Raises InputError, before anything runs, if it does not fit.

    shared: rows of the sequence's last prompt that this prompt shares (`TokenSequence.shared`).
    """
    request, kv = run.request, sequence.engine.kv
    if run.prompt.whole and not request.follow_up and not shared:
        read_ahead(sequence, run.prompt, run.watch)
        shared = sequence.keep_beginning(run.prompt)
    elif not request.follow_up:
        sequence.reset(shared)
    if not read_ahead(sequence, run.prompt, run.watch):
        sequence.check_fits(run.prompt, shared)
        if request.beams is not None:
            from edge.run.decoding.beams import check_room

            held = kv.length if request.follow_up else shared
            check_room(kv.capacity, held + run.prompt.waiting, request.max_tokens or 0)
    cached = sequence.rows.prompt_cache is not None
    outline = request.places(run.model, run.prompt.thinks, shared=cached) if kv.has_tail else Outline()
    run.prompt = sequence.begin(run.prompt, outline, follow_up=request.follow_up)


def generate(sequence: TokenSequence, run: Generation) -> Iterator[str]:
    """Run the prompt and yield the answer's pieces, until something ends it, which sets `run.stop_reason`."""
    for piece in loop_of(sequence, run):
        if piece is Pause.PENDING:
            sequence.run_pending(run.sample, run.most_ahead)
        elif isinstance(piece, str):
            shown = time.perf_counter()
            yield piece
            run.held += time.perf_counter() - shown


def loop_of(sequence: TokenSequence, run: Generation) -> Loop:
    """Like `generate`, but the driver runs pending tokens: the outcome of that pass must be there before it resumes."""
    if not run.request.follow_up and (sequence.engine.kv.length or not run.watch.ends_now()):
        run.reused = sequence.reuse()
    run.restored_at = time.perf_counter()
    for done, known in prefill(sequence, run):
        if run.on_prefill:
            run.on_prefill(done, known)
        if sequence.prompt.waiting:
            yield Pause.PROMPT
    answer = decode
    if run.request.beams is not None:
        from edge.run.decoding.beams import search

        answer = search
    for piece in answer(sequence, run) if sequence.prompt_done else ():
        if isinstance(piece, str) and run.text is not None:
            run.text.write(piece)
        if piece:
            yield piece


def read_ahead(sequence: TokenSequence, prompt: Prompt, watch: Watch) -> StopReason | None:
    """Read as much of a prompt as decisions about its next chunk depend on: the cache's capacity and a chunk, or all
    tokens that RoPE's factors depend on, whichever is more.

    Returns the stop reason if a budget ended first: tokenizing a long text takes time and joules, too.
    """
    kv = sequence.engine.kv
    wanted = max(kv.capacity + sequence.plan.config.chunk, kv.foresight)
    while prompt.waiting < wanted and prompt.read():
        if prompt.known > _READ_UNASKED and (reason := watch.ends_now()):
            return reason
    return None


def prefill(sequence: TokenSequence, run: Generation) -> Iterator[tuple[int, int]]:
    """Run the prompt chunk by chunk, until `sequence.prompt_done` or a budget ends it, which sets `run.stop_reason`.

    Yields after each pass: tokens run, and tokens to run in all, as far as the prompt is known.
    """
    prompt, watch, kv = sequence.prompt, run.watch, sequence.engine.kv
    read_ahead(sequence, prompt, watch)
    sequence.choose_ends()
    count, size = 0, sequence.pass_size(prompt.waiting)
    unobserved = sequence.policy.needs.queries > 0 and 0 < kv.free < min(size, prompt.waiting)
    first = kv.free if unobserved else size  # no pass observed attention for this prompt: first run what fits
    chunk = 0  # tokens that have room: one pass, or several where others take turns
    while not (reason := watch.before_pass(count) or read_ahead(sequence, prompt, watch)) and (left := prompt.waiting):
        if not chunk:
            size = min(size, sequence.pass_size(left))
            wanted = min(size, left, size if run.ran else first, sequence.rows.until_place(prompt))
            affordable = watch.affordable(sequence.undivided(wanted)[0])
            chunk, room = sequence.undivided(affordable)
            if not 0 < chunk <= affordable:
                reason = "energy"
                break
            if not sequence.rows.make_room(room):
                reason = "memory"  # planned rows were returned to the system
                break
        part = run.part_of(chunk, max(2, sequence.policy.needs.queries))  # a single token has kernels of its own
        count = sequence.undivided(part)[0]
        chunk -= count
        upcoming = chunk or sequence.undivided(min(size, left - count), behind=count)[1]
        known = sequence.run_prompt(count, upcoming=max(1, upcoming))
        run.count_prompt(count - known)
        run.reused += known
        yield run.ran, prompt.known - run.reused
    if reason:
        run.stop_reason = reason
        return
    sequence.end_prompt()
    run.prefill_joules = watch.joules()


def decode(sequence: TokenSequence, run: Generation) -> Iterator[str | Pause]:
    """Generate tokens until something ends the answer, which sets `run.stop_reason`. Yields the text that each token
    adds, which may be empty, and at the end the text held back."""
    sample, thinking, stops, watch = run.sample, run.thinking, run.stops, run.watch
    reason: StopReason | None = None
    forced = run.forced()
    while reason is None:
        drawn = not forced
        if drawn and run.constrained is not None:
            run.foresee(None if sequence.policy.evicts else sequence.engine.kv.free)
        token = sequence.next_token(sample) if drawn else forced.popleft()
        run.time_token()
        if thinking.ends(token):
            reason = "eos"
            break
        run.generated += 1
        sample.count(run.generated)
        sequence.append(token)
        text = stops.feed(run.said(thinking.feed(token)))
        if drawn and run.logprobs is not None:
            run.logprobs.tell(token, thought=thinking.thought)
        yield text
        if drawn:
            forced = run.follow(token)
        if run.constrained is not None and run.constrained.holds:
            sequence.settle_choices()
        if stops.met or (run.ended and not forced) or (run.calls is not None and run.calls.enough):
            reason = "stop"
        elif run.generated == run.request.max_tokens:
            reason = "length"
        elif forced:
            continue  # they run in one pass, with the token before them
        else:
            reason = watch.ends_now() if sequence.was_run else watch.before_pass(sequence.ran)
        if reason is None and (closing := thinking.closing()):
            sequence.insert(closing)
            if thinking.banned is not None:  # before an engine chooses the tokens behind it
                sample.ban(thinking.banned)
            forced = run.end_thoughts(closing)
        while reason is None and sequence.pending:
            if sequence.take_ahead():
                continue
            if not sequence.rows.make_room(sequence.next_pass):
                shrunk = sequence.engine.kv.capacity < sequence.plan.config.capacity
                reason = "memory" if shrunk else "capacity"
            else:
                yield Pause.PENDING
    closed = run.constrained is not None and run.constrained.closes and not run.calls_suffice
    if closed and reason in ("eos", "stop") and not stops.met:
        reason = run.limit
    rest = run.said(thinking.rest())
    rest += run.end(reason)
    if not stops.met:
        yield stops.feed(rest)
    yield stops.rest()
    watch.pay()
