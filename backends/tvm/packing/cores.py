"""The native engine's description of each kind of core, besides its code in `cpu/phases`. TVM is not needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edge.model.cores import (
    Attention,
    Core,
    DeltaNet,
    Dense,
    Experts,
    Features,
    KimiDelta,
    Mamba,
    NextToken,
    PerLayerInput,
    SelectiveScan,
    ShortConvolution,
)
from edge.records import dataclass

LANES = 16

Groups = dict[str, tuple[str, ...]]
"""Matrices that one phase of the pass multiplies, by the name of the phase."""


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine scratch memory. rows: tokens of a chunk or, in a step, one copy for each thread."""

    tokens: int  # of a chunk, in whole batches
    rows: int
    threads: int


Counts = dict[str, int]


def _none(_core: Any, _sizes: Sizes) -> Counts:
    return {}


@dataclass(frozen=True)
class Kind:
    """A kind of core on CPUs.

    marks: the parts of its phases that are timed (`cpu/timing.py`) in their order, norms aside, and the phase of
    `backends.base.PHASES` that each belongs to.

    floats, integers: numbers of values of its scratch arrays, by name. Cores share arrays of the same name; the largest
    is allocated. Two names are special: "work" is the memory of one thread; "quantized" has no memory, but counts the
    activations that are quantized at once, if they are more than the pass's widest rows.
    """

    groups: Callable[[Any], Groups]
    marks: dict[str, str]
    floats: Callable[[Any, Sizes], Counts]
    integers: Callable[[Any, Sizes], Counts] = _none
    lacks: Callable[[Any], str | None] = lambda _core: None  # why the kernels cannot run a core

    def scratch(self, core: Core, sizes: Sizes) -> Counts:
        return self.floats(core, sizes) | self.integers(core, sizes)


@dataclass(frozen=True)
class RoutedRows:
    """Sizes of rows between the phases of experts. experts: the padded number. logits, shares: values of a token's row.
    places: rows of activations of a token. scores: of a thread, with those of groups."""

    experts: int
    logits: int
    shares: int
    places: int
    scores: int

    @classmethod
    def of(cls, core: Experts) -> RoutedRows:
        experts, shared = round_up(core.number, LANES), int(core.shared > 0)
        scores = experts + (round_up(core.groups, LANES) if core.groups > 1 else 0)
        return cls(experts, experts + shared * LANES, round_up(core.used + shared, LANES), core.used + shared, scores)


def kind_of(core: Core) -> Kind:
    return KINDS[type(core)]


def groups_of(core: Core) -> Groups:
    return kind_of(core).groups(core)


def state_values(core: Core) -> int:
    """Values of one head's matrix, or of a tile of channels, in a recurrent core's fixed state; 0 for cores whose state
    is only earlier inputs."""
    if isinstance(core, SelectiveScan):
        return core.size * LANES
    if not isinstance(core, DeltaNet | KimiDelta | Mamba):
        return 0
    return (core.fixed_values - (core.kernel - 1) * core.mixed) // core.heads


def supports(core: Core) -> str | None:
    """The reason why the kernels cannot run a core; None if they can."""
    return kind_of(core).lacks(core)


def _width(core: Core) -> int:
    """The padded width of the rows that output projections read."""
    return round_up(core.width, 32)


def _attention_groups(core: Attention) -> Groups:
    found: Groups = {"qkv": core.inputs}
    if core.latent:
        found |= {"queries": ("attn_q_b",)} if core.latent.rank else {}
        found |= {"absorb": ("attn_k_b",), "expand": ("attn_v_b",)}
    return found | ({"crossing": core.crossing} if core.across else {}) | {"output": (core.output,)}


def _attention_floats(core: Attention, sizes: Sizes) -> Counts:
    """Without queries and the threads' memory, whose sizes depend on all layers (`cpu/scratch.py`)."""
    found = {"mixed": sizes.rows * round_up(core.mixed, 32), "gates": sizes.tokens * _width(core) * core.gated}
    if latent := core.latent:
        found |= {
            "gates": sizes.tokens * round_up(core.heads, LANES) * latent.gated,
            "ranked": sizes.tokens * latent.rank, "ranked_normed": sizes.rows * latent.rank,
            "latents": sizes.tokens * core.row.key, "plain": sizes.tokens * core.heads * latent.plain,
            "expanded": sizes.tokens * core.width,
        }  # fmt: skip
    return found


def _attention_lacks(core: Attention) -> str | None:
    if core.shared_values and not core.latent:
        return "attention whose values are a part of the keys"
    if latent := core.latent:
        rotated, row = core.rotated, core.row.value
        odd = any(size % 32 for size in (latent.rank, latent.plain, row, core.width))
        if odd or rotated % LANES or latent.value % LANES:
            return f"latent attention with heads of {latent.plain}, {rotated} and {latent.value} values"
    if core.rope.first and core.rope.halves and not core.latent:
        return "heads whose first values are not rotated"
    return "clipped matrices of decoders" if core.clipped and core.causal else None


def _delta_floats(core: DeltaNet, sizes: Sizes) -> Counts:
    return {
        "mixed": sizes.rows * _width(core),
        "channels": sizes.tokens * (core.mixed + core.width),
        "steps": sizes.tokens * 2 * round_up(core.heads, LANES),
        "work": round_up(2 * core.size + core.value_size, LANES),
    }


def _delta_lacks(core: DeltaNet) -> str | None:
    whole = core.size % LANES == core.value_size % LANES == 0
    return None if whole else f"gated delta nets with heads of {core.size} and {core.value_size} values"


def kimi_steps(core: KimiDelta) -> int:
    """Values of a token's row of `steps`: β, padded, and decays."""
    return round_up(core.heads, LANES) + core.width


def _kimi_floats(core: KimiDelta, sizes: Sizes) -> Counts:
    return {
        "mixed": sizes.rows * _width(core),
        "channels": sizes.tokens * (core.mixed + core.width),
        "steps": sizes.tokens * kimi_steps(core),
        "selected": sizes.tokens * 2 * core.rank,
        "work": 4 * core.size,
    }


def _kimi_lacks(core: KimiDelta) -> str | None:
    whole = core.size % LANES == core.rank % 32 == 0
    return None if whole else f"{core.kind} with heads of {core.size} values and a rank of {core.rank}"


def mamba_row(core: Mamba) -> int:
    """Values of a token's row of `channels`: those of `ssm_in`, padded."""
    return round_up(core.width + core.mixed + core.heads, LANES)


def _mamba_floats(core: Mamba, sizes: Sizes) -> Counts:
    return {
        "mixed": sizes.rows * _width(core),
        "scanned": sizes.tokens * _width(core),
        "channels": sizes.tokens * mamba_row(core),
        "work": round_up(2 * core.size + core.head_dim, LANES),
    }


def _mamba_lacks(core: Mamba) -> str | None:
    whole = core.size % LANES == core.head_dim % LANES == 0
    return None if whole else f"Mamba-2 with heads of {core.size} and {core.head_dim} values"


def scan_row(core: SelectiveScan) -> int:
    """Values of a token's row of `steps`: Δ, B and C."""
    return core.width + 2 * core.size


def _scan_floats(core: SelectiveScan, sizes: Sizes) -> Counts:
    return {
        "mixed": sizes.rows * _width(core),
        "channels": sizes.tokens * core.channels,
        "convolved": sizes.tokens * core.width,
        "selected": sizes.tokens * core.selected,
        "ranked_normed": sizes.rows * core.rank,
        "steps": max(sizes.tokens, sizes.threads) * scan_row(core),
        "work": LANES,
    }


def _scan_lacks(core: SelectiveScan) -> str | None:
    whole = core.width % 32 == core.size % LANES == core.rank % LANES == 0
    return (
        None if whole else f"Mamba-1 of {core.width} channels, {core.size} values in a state and a rank of {core.rank}"
    )


def _convolution_floats(core: ShortConvolution, sizes: Sizes) -> Counts:
    return {"mixed": sizes.rows * _width(core), "channels": sizes.tokens * 3 * _width(core)}


def _convolution_lacks(core: ShortConvolution) -> str | None:
    return f"short convolutions of {core.hidden} channels" if core.hidden % LANES else None


def _experts_floats(core: Experts, sizes: Sizes) -> Counts:
    rows = RoutedRows.of(core)
    return {
        "ffn": sizes.tokens * rows.places * _width(core),
        "quantized": sizes.rows * rows.places * _width(core),
        "routes": sizes.tokens * rows.logits,
        "scores": sizes.threads * rows.scores,
        "shares": sizes.rows * rows.shares,
    }


def _experts_integers(core: Experts, sizes: Sizes) -> Counts:
    return {
        "ranks": sizes.threads * RoutedRows.of(core).experts,
        "chosen": sizes.rows * core.used,
        "members": sizes.tokens * core.used,
        "starts": core.number + 1,
        "waves": core.number + 2,
    }


def _next_token_lacks(core: NextToken) -> str | None:
    return f"{core.kind} of {core.hidden} values" if core.hidden % 32 else None


def _features_lacks(core: Features) -> str | None:
    return f"{core.kind} of {core.hidden} and {core.size} values" if core.hidden % 32 or core.size % 32 else None


KINDS: dict[type, Kind] = {
    Attention: Kind(
        _attention_groups,
        # merge: in a step, of the threads' parts of each head's output
        {"quantize_x": "other", "qkv": "qkv", "crossing": "qkv", "rank": "qkv", "queries": "qkv",
         "quantize_plain": "qkv", "absorb": "qkv", "transform": "qkv", "pages": "attend", "attend": "attend",
         "merge": "attend", "gate": "output", "quantize_mixed": "output", "expand": "output",
         "quantize_expanded": "output", "output": "output"},
        _attention_floats,
        lacks=_attention_lacks,
    ),
    Dense: Kind(
        lambda core: {"gate_up": core.inputs, "down": (core.output,)},
        {"gate_up": "gate-up", "quantize_ffn": "down", "down": "down"},
        lambda core, sizes: {"ffn": sizes.tokens * _width(core)},
    ),
    Experts: Kind(
        lambda core: {"router": core.routers, "experts_in": core.inputs, "experts_out": core.outputs},
        {"router": "other", "route": "other", "fetch": "other", "experts_in": "gate-up", "quantize_ffn": "down",
         "experts_out": "down"},
        _experts_floats,
        _experts_integers,
    ),
    DeltaNet: Kind(
        lambda core: {"delta_in": core.inputs, "delta_out": (core.output,)},
        {"delta_in": "qkv", "delta_net": "attend", "quantize_mixed": "output", "delta_out": "output"},
        _delta_floats,
        lacks=_delta_lacks,
    ),
    KimiDelta: Kind(
        lambda core: {
            "kimi_in": core.inputs, **({"kimi_gates": core.gates} if core.gates else {}), "kimi_out": (core.output,)
        },
        {"kimi_in": "qkv", "quantize_selected": "qkv", "kimi_gates": "qkv", "kimi_delta": "attend",
         "quantize_mixed": "output", "kimi_out": "output"},
        _kimi_floats,
        lacks=_kimi_lacks,
    ),
    Mamba: Kind(
        lambda core: {"mamba_in": core.inputs, "mamba_out": (core.output,)},
        {"mamba_in": "qkv", "mamba_scan": "attend", "mamba_gate": "output", "quantize_mixed": "output",
         "mamba_out": "output"},
        _mamba_floats,
        lacks=_mamba_lacks,
    ),
    SelectiveScan: Kind(
        lambda core: {"scan_in": core.inputs, "scan_select": ("ssm_x",), "scan_steps": ("ssm_dt",),
                      "scan_out": (core.output,)},
        {"scan_in": "qkv", "scan_convolve": "attend", "quantize_convolved": "attend", "scan_select": "attend",
         "scan_norms": "attend", "scan_steps": "attend", "selective_scan": "attend", "quantize_mixed": "output",
         "scan_out": "output"},
        _scan_floats,
        lacks=_scan_lacks,
    ),
    ShortConvolution: Kind(
        lambda core: {"conv_in": core.inputs, "conv_out": (core.output,)},
        {"conv_in": "qkv", "convolve": "attend", "quantize_mixed": "output", "conv_out": "output"},
        _convolution_floats,
        lacks=_convolution_lacks,
    ),
    PerLayerInput: Kind(
        lambda core: {"input_gate": core.inputs, "input_out": (core.output,)},
        {"quantize_x": "other", "input_gate": "other", "quantize_ffn": "down", "input_out": "other"},
        lambda core, sizes: {"ffn": sizes.tokens * _width(core)},
    ),
    NextToken: Kind(
        lambda core: {"next_token": (core.output,)},
        {"join": "embed", "quantize_joined": "embed", "next_token": "embed"},
        lambda core, sizes: {"given": sizes.tokens * core.hidden, "joined": sizes.rows * core.width},
        lacks=_next_token_lacks,
    ),
    Features: Kind(
        lambda core: {"fuse": (core.output,)},
        {"quantize_features": "embed", "fuse": "embed", "join": "embed", "quantize_joined": "embed"},
        lambda core, sizes: {
            "given": sizes.tokens * core.hidden, "features": sizes.tokens * core.size,
            "joined": sizes.rows * 2 * core.hidden,
        },
        lacks=_features_lacks,
    ),
}  # fmt: skip
