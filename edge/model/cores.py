"""The cores of blocks, such as attention, with their tensors and the size of their states.

A core reads normalised rows x. Its last matrix, `output`, multiplies the core's result (see `layers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, TypeVar

from edge.records import dataclass

Activation = Literal["silu", "gelu", "gelu_erf", "relu2"]
Router = Literal["softmax", "sigmoid"]
Bits = Literal["usual", "more", "all"]

EXACT = ("ssm_conv1d", "shortconv.conv")  # matrices that stay in float32, even in models without a `Network`


@dataclass(frozen=True)
class Tensor:
    """A matrix [rows, columns] or, with 0 columns, a vector of `rows` values.

    name: within its layer, without `.weight`: `attn_q`, `attn_q.bias`. experts: the number of experts, each with a
    matrix or vector of this shape; 0: a single one. bits: those that quantizers keep: more than usual, or all, where
    rounding does harm out of proportion to the tensor's bytes. stored: the shape in files, in ggml's order, where it
    has more dimensions. same_as: the tensor of the layer that files have in its place.
    """

    name: str
    rows: int
    columns: int = 0
    experts: int = 0
    bits: Bits = "usual"
    stored: tuple[int, ...] = ()
    same_as: str = ""

    @property
    def exact(self) -> bool:
        return self.name in EXACT


@dataclass(frozen=True)
class Rope:
    """Rotary positions: `dim` values of a head, from `first` on, are rotated, pair i by position · base^(−2i / dim).

    dim is 0 where nothing is rotated. halves: value i pairs with value i + dim / 2, not with its neighbour.

    sections: positions have several components (M-RoPE: time, height, width), and so many pairs go by each. The first
    section has the first pairs or, if `interleaved`, pair i belongs to component i mod 3 while that has pairs left, and
    the rest to the first component. restarts: the frequencies of each section begin again, pair j of its n pairs with
    base^(−j / n), as of pictures' rows and columns. apart: a section of n pairs has 2 n values of its own, whose halves
    pair.

    scaling: linear divides positions by `factor`; yarn (arXiv:2309.00071) does so for long wavelengths only; longrope
    (arXiv:2402.13753) divides by factors from the file, with a second set for long texts. Factors named `rope_freqs`
    (llama3) apply with every scaling. magnitude: multiplies all cosines and sines.

    yarn: pairs that rotate more than `beta_fast` times in the original context keep their frequency, and pairs that
    rotate less than `beta_slow` times are stretched. log_multiplier: yarn's own magnitude is divided by the magnitude
    for this multiplier (DeepSeek's `mscale_all_dim`).
    """

    dim: int
    base: float
    halves: bool = False
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0  # positions before scaling
    magnitude: float = 1.0
    has_long: bool = False  # the file has longrope's factors for texts beyond the original context
    has_freqs: bool = True  # factors named `rope_freqs` apply, if the file has them
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0
    first: int = 0
    sections: tuple[int, ...] = ()
    interleaved: bool = False
    restarts: bool = False
    apart: bool = False

    @property
    def components(self) -> tuple[int, ...]:
        """The component of the position that rotates each pair, [dim / 2]; empty if positions have only one."""
        if not self.interleaved:
            return tuple(index for index, count in enumerate(self.sections) for _ in range(count))
        number = len(self.sections)
        return tuple(
            pair % number if pair // number < self.sections[pair % number] else 0 for pair in range(self.dim // 2)
        )


BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""A clipped matrix reads rows within the first two, and its products are limited to the last two. Matrices that read
the same rows have the same bounds of them."""

SLOPE = 1.702  # of the sigmoid with which clamped experts approximate GELU
UNROTATED = Rope(dim=0, base=1.0)  # of layers whose keys have no position (NoPE, arXiv:2305.19466)


@dataclass(frozen=True)
class Temperature:
    """A query at position p is multiplied by 1 + slope · log(1 + ⌊p / period⌋), as in Llama 4.

    p is the position in `KVCache.positions`, which decreases when gaps before it are closed. Keys have no
    temperature, so rows of the cache stay as they are when their positions change.
    """

    slope: float
    period: int


@dataclass(frozen=True)
class RowShape:
    """The row that a token has in the KV cache of a layer: a key and a value for each KV head.

    rotated: the part of a key that RoPE rotates, as its first value and its length. shared: a value is the beginning of
    its key, and has no memory of its own (latent attention).
    """

    heads: int  # KV heads; 1: all query heads read the same row
    key: int  # values of a key
    value: int  # values of a value
    rotated: tuple[int, int] = (0, 0)
    shared: bool = False

    @property
    def stored_value(self) -> int:
        """Values of a value that have memory of their own."""
        return 0 if self.shared else self.value

    @property
    def mixed(self) -> int:
        """Values that attention mixes: where memory is shared, whole keys, whose ends it drops."""
        return self.key if self.shared else self.value

    @property
    def values(self) -> int:
        """Stored values of all heads."""
        return self.heads * (self.key + self.stored_value)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """What memory depends on: layers with the same sizes can share it."""
        return self.heads, self.key, self.stored_value

    def padded(self, step: int) -> RowShape:
        """With keys and values of whole multiples of `step` values."""
        return replace(self, key=-(-self.key // step) * step, value=-(-self.value // step) * step)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) in its absorbed form.

    `attn_kv_a_mqa` · x is a latent vector c, which `attn_kv_a_norm` normalises, and a key k with a position. All heads
    read one row, the key [c, RoPE(k)] and the value c. A head's query is [q, p]: q has no position and is multiplied by
    the head's `attn_k_b`, p is rotated. What a head mixes from the values is multiplied by its `attn_v_b`.
    """

    plain: int  # values of q
    value: int  # that a head hands to the output projection
    rank: int = 0  # queries are `attn_q_b` · norm(`attn_q_a` · x), through so many values; 0: `attn_q` · x
    joined: bool = False  # files have `attn_k_b`, transposed, and `attn_v_b` in one matrix, `attn_kv_b`, head by head


@dataclass(frozen=True)
class Attention:
    """Softmax attention. State: a row of keys and values for each token, or for each of the last `window` tokens.

    `attn_q`, `attn_k`, `attn_v` project the normalised rows to heads; a group of query heads shares a KV head. With
    `rows_of`, the layer has queries only, which read the rows of an earlier layer with KV heads of the same sizes; so
    has one `across`, whose `attn_k` and `attn_v` project states of an encoder (`CrossEngine`), the same for all tokens.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of queries
    rope: Rope = UNROTATED
    window: int = 0  # positions that a token attends to: its own is the last, or the middle in encoders; 0: all
    head_norms: bool = False  # of each head's queries and keys, before RoPE
    biases: tuple[str, ...] = ()  # the matrices that have one
    score_cap: float = 0.0  # scores become cap · tanh(score / cap); 0: no cap
    temperature: Temperature | None = None
    gated: bool = False  # the output is multiplied by the sigmoid of `attn_q_gate` · x
    sinks: bool = False  # softmax sees one more score in each head, `attn_sinks`, whose share is dropped
    unit_values: bool = False  # each head's values are divided by their root mean square
    rows_of: int | None = None  # the layer whose rows are read; None: this one's
    across: bool = False  # cross attention
    causal: bool = True  # a token sees those before it; False: all of its text
    value_dim: int = 0  # of a value; 0: head_dim
    shared_values: bool = False  # a value is the beginning of its key, and there is no `attn_v`
    keys_as_values: bool = False  # files have no `attn_v`, which is `attn_k`: values differ by norm and RoPE only
    clipped: bool = False  # matrices have bounds (see `BOUNDS`)
    joined: bool = False  # it reads the rows that `Features` has joined, [n, 2 · hidden]
    latent: Latent | None = None  # `kv_heads` is 1, `head_dim` the size of a row's key, `value_dim` of its value

    output = "attn_output"
    fixed_values = 0

    @property
    def inputs(self) -> tuple[str, ...]:
        """Matrices that multiply the normalised rows."""
        if self.latent:
            return ("attn_q_a" if self.latent.rank else "attn_q", "attn_kv_a_mqa")
        own = ("attn_k", "attn_v")[: 2 - self.shared_values] if self.makes_rows else ()
        return ("attn_q", *own, *(("attn_q_gate",) if self.gated else ()))

    @property
    def crossing(self) -> tuple[str, ...]:
        """Matrices that multiply an encoder's states."""
        return ("attn_k", "attn_v") if self.across else ()

    @property
    def makes_rows(self) -> bool:
        """Whether its layer adds rows to the KV cache."""
        return self.rows_of is None and not self.across

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def queries(self) -> int:
        """Values of all heads' queries."""
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Values that all heads mix from the rows' values."""
        return self.heads * self.row.value

    @property
    def width(self) -> int:
        """Values that the core hands to its output projection."""
        return self.heads * self.latent.value if self.latent else self.mixed

    @property
    def widest(self) -> int:
        """The length of the longest row that a matrix of the core multiplies, besides the normalised rows."""
        return max(self.mixed, self.width, self.heads * self.latent.plain if self.latent else 0)

    @property
    def row(self) -> RowShape:
        """The rows that it reads."""
        value, rotated = self.value_dim or self.head_dim, (self.rope.first, self.rope.dim)
        return RowShape(self.kv_heads, self.head_dim, value, rotated, self.shared_values)

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        if self.latent:
            yield from self._latent_tensors(self.latent, hidden)
            return
        row = self.row
        rows = {
            "attn_q": self.queries, "attn_k": row.heads * row.key, "attn_v": row.heads * row.value,
            "attn_q_gate": self.width,
        }  # fmt: skip
        same, columns = {"attn_v": "attn_k"} if self.keys_as_values else {}, hidden * (1 + self.joined)
        matrices = (
            Tensor(name, rows[name], columns, same_as=same.get(name, "")) for name in (*self.inputs, *self.crossing)
        )
        yield from _with_biases(matrices, self.biases)
        for name in ("attn_q", "attn_k") if self.head_norms else ():
            if name in self.inputs:
                yield Tensor(f"{name}_norm", self.head_dim)
        if self.sinks:
            yield Tensor("attn_sinks", self.heads)
        yield from _with_biases([Tensor(self.output, hidden, self.width)], self.biases)
        yield from _bounds(self)

    def _latent_tensors(self, latent: Latent, hidden: int) -> Iterator[Tensor]:
        row, heads = self.row, self.heads
        queries = heads * (latent.plain + row.key - row.value)
        if latent.rank:
            yield Tensor("attn_q_a", latent.rank, hidden)
            yield Tensor("attn_q_a_norm", latent.rank)
            yield Tensor("attn_q_b", queries, latent.rank)
        else:
            yield Tensor("attn_q", queries, hidden)
        yield Tensor("attn_kv_a_mqa", row.key, hidden)
        yield Tensor("attn_kv_a_norm", row.value)
        both = (row.value, heads * (latent.plain + latent.value)) if latent.joined else ()
        yield Tensor("attn_k_b", heads * row.value, latent.plain, stored=both or (latent.plain, row.value, heads))
        yield Tensor("attn_v_b", self.width, row.value, stored=both or (row.value, latent.value, heads))
        yield Tensor(self.output, hidden, self.width)


@dataclass(frozen=True)
class Dense:
    """A feed-forward network: activation(gate) · up, or activation(up) without a gate."""

    ffn: int
    activation: Activation = "silu"  # gelu in its tanh form, gelu_erf exact; relu2 is max(x, 0)²
    gated: bool = True
    biases: tuple[str, ...] = ()
    clipped: bool = False  # matrices have bounds (see `BOUNDS`)

    output = "ffn_down"
    fixed_values = 0

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("ffn_gate", "ffn_up") if self.gated else ("ffn_up",)

    @property
    def width(self) -> int:
        return self.ffn

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        yield from _with_biases((Tensor(name, self.ffn, hidden) for name in self.inputs), self.biases)
        yield from _with_biases([Tensor(self.output, hidden, self.ffn)], self.biases)
        yield from _bounds(self)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: feed-forward networks, of which a router chooses `used` for each token. No state.

    With logits r = `ffn_gate_inp` · x, the experts with the largest scores are chosen; ties go to the first. A score
    is the logit or, for a sigmoid router, sigmoid(r) plus `exp_probs_b`, which affects the choice only. Shares
    are e^r or sigmoid(r), divided by their sum over the chosen and multiplied by `scale`. (A softmax of all logits that
    is normalised again over the chosen is the softmax of their logits.) If they are not `normed`, e^r is divided by the
    sum over all experts, and sigmoid(r) by nothing.

        y = Σ share_e · down_e(activation(gate_e · x) ⊙ up_e · x)

    With a `clamp`, g = gate_e · x is limited to at most `clamp`, u = up_e · x to ±clamp, and activation(g) ⊙ u becomes
    g · sigmoid(1.702 g) ⊙ (u + 1). biases: of the router and of all experts.

    A shared expert runs for every token. Its output, multiplied by sigmoid(`ffn_gate_inp_shexp` · x) if it is
    `shared_gated`, is added.

    own_norms: x are hidden states, which the core normalises itself: for experts by `pre_ffw_norm_2`, for the router by
    `ffn_gate_inp.scale`, divided by √hidden. share_e is then multiplied by `ffn_down_exps.scale`_e.
    """

    number: int
    used: int
    ffn: int  # of each
    router: Router = "softmax"
    choice_bias: bool = False  # there is an `exp_probs_b`
    scale: float = 1.0
    normed: bool = True
    shared: int = 0  # the `ffn` of the shared expert; 0: there is none
    activation: Activation = "silu"
    clamp: float = 0.0  # 0: none
    biases: bool = False
    shared_gated: bool = True
    own_norms: bool = False

    output, kind = "ffn_down_exps", "mixtures of experts"
    fixed_values = 0

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("ffn_gate_exps", "ffn_up_exps", *(("ffn_gate_shexp", "ffn_up_shexp") if self.shared else ()))

    @property
    def norms(self) -> tuple[str, ...]:
        """The core's own norms: of experts' inputs, and of the router's."""
        return ("pre_ffw_norm_2", "ffn_gate_inp.scale") if self.own_norms else ()

    @property
    def routers(self) -> tuple[str, ...]:
        """The matrices that choose and weigh the experts, and the gate of the shared expert."""
        return ("ffn_gate_inp", *(("ffn_gate_inp_shexp",) if self.shared_has_share else ()))

    @property
    def shared_has_share(self) -> bool:
        """Whether a gate scales the shared expert's output."""
        return self.shared > 0 and self.shared_gated

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.output, *(("ffn_down_shexp",) if self.shared else ()))

    @property
    def width(self) -> int:
        """The largest input width of an expert's output projection."""
        return max(self.ffn, self.shared)

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        biases = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", self.output) if self.biases else ()
        yield from (Tensor(name, hidden) for name in self.norms)
        yield from _with_biases([Tensor("ffn_gate_inp", self.number, hidden, bits="all")], biases)
        if self.choice_bias:
            yield Tensor("exp_probs_b.bias", self.number)
        for name, rows, columns in (
            ("ffn_gate_exps", self.ffn, hidden),
            ("ffn_up_exps", self.ffn, hidden),
            (self.output, hidden, self.ffn),
        ):
            yield from _with_biases([Tensor(name, rows, columns, experts=self.number)], biases)
        if self.own_norms:
            yield Tensor("ffn_down_exps.scale", self.number)
        if self.shared_has_share:
            yield Tensor("ffn_gate_inp_shexp", 1, hidden, bits="all")
        if self.shared:
            yield Tensor("ffn_gate_shexp", self.shared, hidden)
            yield Tensor("ffn_up_shexp", self.shared, hidden)
            yield Tensor("ffn_down_shexp", hidden, self.shared)


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (arXiv:2412.06464). State: the last inputs of its convolution, and a matrix for each head.

    For each token: c = SiLU(Σ_j w_j · u_{t−j}), a causal convolution over u = `attn_qkv` · x, gives queries and keys of
    `key_heads` heads and values of `heads`. Head h uses the key head h mod key_heads. With queries and keys normalised
    to length 1, q divided by √size, g = exp(a · softplus(α + dt)) and β = sigmoid(`ssm_beta` · x):

        S ← g · S;  S += k ⊗ β (v − Sᵀ k);  o = Sᵀ q

    The output is RMSNorm(o) · SiLU(z), head by head, with z = `attn_gate` · x and α = `ssm_alpha` · x. The file stores
    a as `ssm_a`, which is negative, and dt as `ssm_dt.bias`.
    """

    heads: int
    key_heads: int
    size: int  # of a query or key
    value_size: int
    kernel: int  # tokens that the convolution sees

    inputs = ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")
    output, kind = "ssm_out", "gated delta nets"

    @property
    def width(self) -> int:
        return self.heads * self.value_size

    @property
    def mixed(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.size + self.width

    @property
    def channels(self) -> int:
        """Values of a token between the products and the recurrence."""
        return self.convolved + self.width

    @property
    def convolved(self) -> int:
        """Values of a token after the convolution: its channels, and two gates of each head."""
        return self.mixed + 2 * self.heads

    @property
    def fixed_values(self) -> int:
        """Values of the state, float32."""
        return (self.kernel - 1) * self.mixed + self.heads * self.size * self.value_size

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        yield Tensor("attn_qkv", self.mixed, hidden)
        yield Tensor("attn_gate", self.width, hidden)
        yield Tensor("ssm_beta", self.heads, hidden, bits="all")  # errors of the gates accumulate over a text
        yield Tensor("ssm_alpha", self.heads, hidden, bits="all")
        yield Tensor("ssm_conv1d", self.mixed, self.kernel)
        yield Tensor("ssm_dt.bias", self.heads)
        yield Tensor("ssm_a", self.heads)
        yield Tensor("ssm_norm", self.value_size)
        yield Tensor(self.output, hidden, self.width, bits="more")


@dataclass(frozen=True)
class Mamba:
    """Mamba-2 (arXiv:2405.21060). State: the last inputs of its convolution, and a matrix for each head.

    `ssm_in` · x gives z, u and dt. A causal convolution over u with a bias, c = SiLU(b + Σ_j w_j · u_{t−j}), gives
    values x of `heads`, and B and C of `groups`, each of which serves heads / groups consecutive heads. For each token
    and head, with Δ = softplus(dt + `ssm_dt.bias`), and a = `ssm_a`, which is negative:

        S ← e^(a·Δ) · S + B ⊗ Δx;  y = Sᵀ C + `ssm_d` · x

    The output is y · SiLU(z) or, if `normed`, its RMSNorm within each group, times `ssm_norm`.
    """

    heads: int
    groups: int
    size: int  # of B and C
    head_dim: int  # of values
    kernel: int  # tokens that the convolution sees
    normed: bool = True

    inputs = ("ssm_in",)
    output, kind = "ssm_out", "Mamba-2"

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Channels of the convolution: values, B, C."""
        return self.width + 2 * self.groups * self.size

    @property
    def channels(self) -> int:
        """Values of a token between the product and the recurrence."""
        return self.width + self.mixed + self.heads

    @property
    def convolved(self) -> int:
        """Values of a token after the convolution: its channels, and two factors of each head."""
        return self.mixed + 2 * self.heads

    @property
    def fixed_values(self) -> int:
        """Values of the state, float32."""
        return (self.kernel - 1) * self.mixed + self.heads * self.size * self.head_dim

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        yield Tensor("ssm_in", self.width + self.mixed + self.heads, hidden)
        yield Tensor("ssm_conv1d", self.mixed, self.kernel)
        yield Tensor("ssm_conv1d.bias", self.mixed)
        yield Tensor("ssm_dt.bias", self.heads)
        yield Tensor("ssm_a", self.heads, stored=(1, self.heads))
        yield Tensor("ssm_d", self.heads, stored=(1, self.heads))
        if self.normed:
            yield Tensor("ssm_norm", self.width, stored=(self.width // self.groups, self.groups))
        yield Tensor(self.output, hidden, self.width, bits="more")


@dataclass(frozen=True)
class ShortConvolution:
    """A gated causal convolution of each channel (LFM2, arXiv:2511.23404). State: its last inputs.

    With (B, C, z) = `shortconv.in_proj` · x and u = B ⊙ z, the output is y_t = C_t ⊙ Σ_j w_j ⊙ u_{t−j}.
    """

    hidden: int
    kernel: int  # tokens that the convolution sees

    inputs = ("shortconv.in_proj",)
    output, kind = "shortconv.out_proj", "short convolutions"

    @property
    def width(self) -> int:
        return self.hidden

    @property
    def channels(self) -> int:
        """Values of a token between the product and the convolution."""
        return 3 * self.hidden

    @property
    def fixed_values(self) -> int:
        return (self.kernel - 1) * self.hidden

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        yield Tensor("shortconv.in_proj", 3 * hidden, hidden)
        yield Tensor("shortconv.conv", hidden, self.kernel)
        yield Tensor(self.output, hidden, hidden)


@dataclass(frozen=True)
class PerLayerInput:
    """A gate on the vector that a token has for this layer (Gemma 3n): gelu(`inp_gate` · x) ⊙ p.

    The vectors p of all layers are computed before the first layer, from the token t and its embedding x₀:

        p_l = (√size · T[t]_l + RMSNorm(W · x₀ / √hidden)_l) / √2

    with the table T = `per_layer_token_embd`, W = `per_layer_model_proj`, and the weights `per_layer_proj_norm`, the
    same for all layers.
    """

    size: int

    inputs = ("inp_gate",)
    output, kind = "proj", "per-layer embeddings"
    fixed_values = 0

    @property
    def width(self) -> int:
        return self.size

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        yield Tensor("inp_gate", self.size, hidden, bits="more")
        yield Tensor(self.output, hidden, self.size, bits="more")


@dataclass(frozen=True)
class NextToken:
    """The input of a layer for multi-token prediction (MTP; DeepSeek-V3, arXiv:2412.19437, section 2.2): the embedding
    e of a token, and the hidden state h of the token before it, both normalised:

        `nextn.eh_proj` · [RMSNorm(e), RMSNorm(h)]

    Its block has no norm, and replaces the hidden states. h comes from the engine's caller.
    """

    hidden: int

    inputs = ()
    output, kind = "nextn.eh_proj", "layers for multi-token prediction"
    fixed_values = 0

    @property
    def width(self) -> int:
        return 2 * self.hidden

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        yield Tensor("nextn.enorm", hidden)
        yield Tensor("nextn.hnorm", hidden)
        yield Tensor(self.output, hidden, 2 * hidden)


@dataclass(frozen=True)
class Features:
    """The input of an EAGLE-3 head (arXiv:2503.01840): the embedding e of a token, and features of the text before it:
    the hidden states f of another model, side by side, which enter some of its `layers`, or the head's own state g.

        g = `fc` · f;  joined = [RMSNorm(e), RMSNorm(g)]

    Its block has no norm. The hidden states become g or, if `normed`, its norm; attention reads `joined`. e, and f or
    g, come from the engine's caller.
    """

    hidden: int
    size: int  # of f
    normed: bool = False
    layers: tuple[int, ...] = ()  # of the other model

    inputs = ()
    output, kind = "fc", "EAGLE-3 heads"
    fixed_values = 0

    @property
    def width(self) -> int:
        return self.size

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        yield Tensor("attn_norm", hidden)
        yield Tensor("attn_norm_2", hidden)
        yield Tensor(self.output, hidden, self.size)


# In JSON, experts have the fields of Dense, too, and features those of the last two.
Core = Attention | Experts | Dense | DeltaNet | Mamba | ShortConvolution | Features | PerLayerInput | NextToken
OneCore = TypeVar(
    "OneCore", Attention, Dense, Experts, DeltaNet, Mamba, ShortConvolution, PerLayerInput, NextToken, Features
)


def _bounds(core: Attention | Dense) -> Iterator[Tensor]:
    matrices = (*core.inputs, core.output) if core.clipped else ()
    return (Tensor(f"{name}.{bound}", 1) for name in matrices for bound in BOUNDS)


def _with_biases(matrices: Iterator[Tensor] | list[Tensor], biases: tuple[str, ...]) -> Iterator[Tensor]:
    for matrix in matrices:
        yield matrix
        if matrix.name in biases:
            yield Tensor(f"{matrix.name}.bias", matrix.rows, experts=matrix.experts)
