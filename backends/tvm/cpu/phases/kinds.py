"""The kinds of passes of a design: steps, chunks and batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edge.backends.tvm.cpu.arguments import Job
from edge.backends.tvm.design import Design

_WIDE = 1024  # hidden states: drafts of narrower models share a chunk's products, a fifth less to compile


@dataclass(frozen=True)
class PassKind:
    """A step (`single`), a chunk, or a batch: the next tokens of several sequences, which are `apart`.

    stepwise: attention and products with adapters are computed for each token as in a step. drafts: some of the tokens
    may be forgotten again.
    """

    name: str  # with which the names of its functions begin
    job: int  # `Job`
    batch: int  # tokens that are multiplied with a tile of weights at once
    single: bool = False
    apart: bool = False
    stepwise: bool = False
    drafts: bool = False
    like_chunk: bool = False  # shares a chunk's products, whose code prefetches no weights: a condition slows prompts
    attends_like: str | None = None  # the pass whose code for attention serves this one, too


def pass_kinds(design: Design) -> list[PassKind]:
    """All passes of a design."""
    most = design.most_tokens
    if design.shape.encoder:
        return [PassKind("chunk", Job.CHUNK, most)]
    batches = enumerate(design.batches, Job.BATCH)
    step, chunk = PassKind("step", Job.STEP, 1, single=True), PassKind("chunk", Job.CHUNK, most)
    if not design.head:  # layers beside another model's rows, to which they add none
        return [step]
    if design.exported:  # drafts of an app's only sequence share a chunk's code, except where they must sum like a step
        step, chunk = replace(step, attends_like="verify"), replace(chunk, drafts=True)
        like_chunk = not design.lora
        return [PassKind("verify", Job.BATCH, most, stepwise=True, drafts=True, like_chunk=like_chunk), step, chunk]
    return [
        step,
        chunk,
        *(
            PassKind(
                f"batch{size}", job, size, apart=True, stepwise=True, drafts=True,
                like_chunk=design.batches == [most] and not design.lora and design.shape.hidden < _WIDE,
            ) for job, size in batches
        ),
    ]  # fmt: skip
