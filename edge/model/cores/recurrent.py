"""Cores with a fixed state."""

from __future__ import annotations

from collections.abc import Iterator

from edge.model.cores.parts import Tensor
from edge.records import dataclass

LANES = 16  # channels of a selective scan whose states lie side by side


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
    output, kind, convolutions = "ssm_out", "gated delta nets", ("ssm_conv1d",)

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
class KimiDelta:
    """Kimi Delta Attention (arXiv:2510.26692): a delta net with a decay for each value of a key.

    As `DeltaNet`, with one key head for each head, values of the size of keys, and these gates: f = `ssm_f_b` ·
    `ssm_f_a` · x and z = `ssm_g_b` · `ssm_g_a` · x, through `rank` values each, or by `ssm_f_a` and `ssm_g_a` alone,
    β = sigmoid(`ssm_beta` · x), and with each head's a = `ssm_a`, which is negative unless g is bounded

        g = exp(a · softplus(f + `ssm_dt.bias`)), or exp(bound · sigmoid(a · (f + `ssm_dt.bias`)))
        S ← diag(g) · S;  S += k ⊗ β (v − Sᵀ k);  o = Sᵀ q

    The output is RMSNorm(o) · sigmoid(z), head by head.
    """

    heads: int
    size: int  # of a query, key or value
    kernel: int  # tokens that the convolutions see
    rank: int  # 0: gates have one matrix each
    bound: float = 0.0  # of the decays' logarithms; 0: none

    output, kind = "attn_output", "Kimi Delta Attention"

    @property
    def key_heads(self) -> int:
        return self.heads

    @property
    def value_size(self) -> int:
        return self.size

    convolutions = ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")
    inputs = ("attn_q", "attn_k", "attn_v", "ssm_beta", "ssm_f_a", "ssm_g_a")

    @property
    def gates(self) -> tuple[str, ...]:
        """Matrices behind `ssm_f_a` and `ssm_g_a`."""
        return ("ssm_f_b", "ssm_g_b") if self.rank else ()

    @property
    def width(self) -> int:
        return self.heads * self.size

    @property
    def mixed(self) -> int:
        """Channels of the convolutions: queries, keys, values."""
        return 3 * self.width

    @property
    def channels(self) -> int:
        """Values of a token between the products and the recurrence: inputs of the convolutions, z, α, β."""
        return 5 * self.width + self.heads

    @property
    def convolved(self) -> int:
        """Values of a token after the convolutions: their channels, decays, and β of each head."""
        return self.mixed + self.width + self.heads

    @property
    def fixed_values(self) -> int:
        return (self.kernel - 1) * self.mixed + self.heads * self.size * self.size

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        for name in self.inputs[:3]:
            yield Tensor(name, self.width, hidden)
        yield Tensor("ssm_beta", self.heads, hidden, bits="all")  # errors of the gates accumulate over a text
        for name in self.inputs[4:]:
            yield Tensor(name, self.rank or self.width, hidden, bits="more")
        for name in self.gates:
            yield Tensor(name, self.width, self.rank, bits="more")
        for name in self.convolutions:
            yield Tensor(name, self.width, self.kernel, stored=(self.kernel, 1, self.width, 1))
        yield Tensor("ssm_dt.bias", self.width)
        yield Tensor("ssm_a", self.heads, stored=(1, self.heads, 1, 1))
        yield Tensor("ssm_norm", self.size)
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
class SelectiveScan:
    """Mamba-1 (arXiv:2312.00752). State: the last inputs of its convolution, and `size` values of each channel.

    `ssm_in` · x gives u and z. A causal convolution over u with a bias gives c = SiLU(b + Σ_j w_j · u_{t−j}), and
    `ssm_x` · c gives dt, B and C, each of which RMSNorm normalises if `norms`, with weights if `weighted`. For each
    token and channel, with Δ = softplus(`ssm_dt` · dt + `ssm_dt.bias`), and a row a of `ssm_a`, which is negative:

        S ← e^(a·Δ) ⊙ S + Δc · B;  y = S · C + `ssm_d` · c

    The output is y · SiLU(z). The state is [width / LANES, size, LANES]: `LANES` channels lie side by side.
    """

    width: int  # channels
    size: int  # of B and C
    rank: int  # of dt
    kernel: int  # tokens that the convolution sees
    norms: bool = False
    weighted: bool = True
    epsilon: float = 1e-6  # of the norms

    inputs = ("ssm_in",)
    output, kind = "ssm_out", "Mamba-1"

    @property
    def convolved(self) -> int:
        """Values of a token after the convolution."""
        return self.width

    @property
    def tiles(self) -> int:
        """Groups of `LANES` channels."""
        return self.width // LANES

    @property
    def selected(self) -> int:
        """Values of a token's dt, B and C."""
        return self.rank + 2 * self.size

    @property
    def parts(self) -> tuple[tuple[str, int, int], ...]:
        """dt, B and C: the tensor of their norm, their first value, their number."""
        ends = self.rank, self.rank + self.size
        return ("ssm_dt_norm", 0, self.rank), ("ssm_b_norm", ends[0], self.size), ("ssm_c_norm", ends[1], self.size)

    @property
    def channels(self) -> int:
        """Values of a token between the product and the convolution."""
        return 2 * self.width

    @property
    def fixed_values(self) -> int:
        return (self.kernel - 1 + self.size) * self.width

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        yield Tensor("ssm_in", 2 * self.width, hidden)
        yield Tensor("ssm_conv1d", self.width, self.kernel)
        yield Tensor("ssm_conv1d.bias", self.width)
        yield Tensor("ssm_x", self.selected, self.width, bits="more")
        for name, _, count in self.parts if self.norms and self.weighted else ():
            yield Tensor(name, count)
        yield Tensor("ssm_dt", self.width, self.rank, bits="more")
        yield Tensor("ssm_dt.bias", self.width)
        yield Tensor("ssm_a", self.width, self.size)
        yield Tensor("ssm_d", self.width)
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
