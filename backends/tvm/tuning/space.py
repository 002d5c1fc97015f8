"""The search space of tuning: fields of `Target`, the number of threads, and the length of prefill chunks.

Decode and prefill are separate code in one compiled function. A field that changes only one of them is judged by that
one alone, and a candidate for decode shares its compilation with one for prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge.backends.tuning import CHUNK, PARTS, STEP, Field, Values
from edge.backends.tvm.targets import Target, target_named


def make_space(target: Target, kv_dtype: str, cores: int, prompt: int) -> tuple[Field, ...]:
    """The fields for an instruction set, KV dtype and number of cores; their defaults are those of `target`.

    Chunks longer than the measured `prompt` are left out, because they cannot be measured.
    """
    chunks = tuple(max(1, prompt >> shift) for shift in range(4, -1, -1))
    fields = [
        *_compiled(target),
        Field("chunk", "tokens per prefill chunk", prompt, chunks, (CHUNK,), compiled=False),
        Field("threads", "CPU threads", cores, tuple(range(1, cores + 1)), PARTS, compiled=False),
    ]
    if kv_dtype == "f32":  # the exact mode has batches of its own
        fields = [each for each in fields if each.name != "gemm_tokens"]
    return tuple(each for each in fields if len(each.choices) > 1)


def _compiled(target: Target) -> list[Field]:
    """The fields of Target."""

    def field(name: str, about: str, choices: tuple[int, ...], *parts: str) -> Field:
        return Field(name, about, getattr(target, name), tuple(sorted({*choices, getattr(target, name)})), parts)

    return [
        field("step_block", "tiles of cache rows between corrections, decode", (4, 8, 16, 32), STEP),
        field("fetch_ahead", "bytes of weights asked for ahead, decode", (0, 2048, 4096, 8192, 16384, 32768), STEP),
        field("fetch_into", "cache that they go to, decode", (0, 2, 3), STEP),
        field("step_dealt", "work dealt out in turn, decode", (False, True), STEP),
        field("gemm_tokens", "tokens per weight tile, prefill", _sixths(target.gemm_tokens, 3, 4, 6, 9, 12), CHUNK),
        field("chunk_block", "tiles of cache rows between corrections, prefill", (8, 16, 32, 64), CHUNK),
        field("pair_rows", "query rows per block in BF16, prefill", _pair_rows(target), CHUNK),
        field("chunk_dealt", "work dealt out in turn, prefill", (False, True), CHUNK),
        field("score_rows", "query rows in registers, attention", _sixths(target.score_rows, 2, 3, 4, 6, 8), *PARTS),
        field("score_tiles", "key tiles in registers, attention", (1, 2, 4), *PARTS),
        field(
            "mix_registers", "accumulators while values are mixed", _sixths(target.mix_registers, 2, 3, 4, 6, 8), *PARTS
        ),
        field("spins", "pauses at a barrier before sleeping", (1, 1000, 10_000, 100_000), *PARTS),
    ]


def compiled_values(target: Target) -> Values:
    """The values of a target that are not its instruction set's defaults."""
    usual = target_named(target.name, f"isa {target.name!r} is unknown")
    fields = [field.name for field in _compiled(usual)]
    return {name: getattr(target, name) for name in fields if getattr(target, name) != getattr(usual, name)}


def allowed(target: Target, values: Values) -> bool:
    """Whether these values are in the search space: unchecked sizes from a file never reach a compiler."""
    choices: dict[str, Sequence[int]] = {field.name: field.choices for field in _compiled(target)}
    choices |= {"threads": range(1, 1025), "chunk": range(1, 8193)}
    return all(value in choices.get(name, ()) for name, value in values.items())


def _pair_rows(target: Target) -> tuple[int, ...]:
    """Whole multiples of the rows in registers; 0 is float32."""
    return (0, 24, 48, 96) if target_named(target.name, "").pair_rows else ()


def _sixths(value: int, *parts: int) -> tuple[int, ...]:
    """Multiples of a sixth of a default. Defaults scale with the number of registers, so candidates scale with them."""
    return tuple(max(1, value * part // 6) for part in parts)
