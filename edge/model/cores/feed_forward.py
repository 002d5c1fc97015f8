"""Feed-forward networks, dense and of experts."""

from __future__ import annotations

from collections.abc import Iterator

from edge.model.cores.parts import Activation, Router, Tensor, bounds, with_biases
from edge.records import dataclass


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
        yield from with_biases((Tensor(name, self.ffn, hidden) for name in self.inputs), self.biases)
        yield from with_biases([Tensor(self.output, hidden, self.ffn)], self.biases)
        yield from bounds((*self.inputs, self.output)) if self.clipped else ()


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: feed-forward networks, of which a router chooses `used` for each token. No state.

    With logits r = `ffn_gate_inp` · x, the experts with the largest scores are chosen; ties go to the first. A score
    is the logit or, for a sigmoid router, sigmoid(r) plus `exp_probs_b`, which affects the choice only. Shares
    are e^r or sigmoid(r), divided by their sum over the chosen and multiplied by `scale`. (A softmax of all logits that
    is normalised again over the chosen is the softmax of their logits.) If they are not `normed`, e^r is divided by the
    sum over all experts, and sigmoid(r) by nothing. Experts in several `groups` are chosen from those `groups_used`
    groups whose two largest scores have the largest sums.

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
    groups: int = 1  # of neighbouring experts
    groups_used: int = 1

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
        yield from with_biases([Tensor("ffn_gate_inp", self.number, hidden, bits="all")], biases)
        if self.choice_bias:
            yield Tensor("exp_probs_b.bias", self.number)
        for name, rows, columns in (
            ("ffn_gate_exps", self.ffn, hidden),
            ("ffn_up_exps", self.ffn, hidden),
            (self.output, hidden, self.ffn),
        ):
            yield from with_biases([Tensor(name, rows, columns, experts=self.number)], biases)
        if self.own_norms:
            yield Tensor("ffn_down_exps.scale", self.number)
        if self.shared_has_share:
            yield Tensor("ffn_gate_inp_shexp", 1, hidden, bits="all")
        if self.shared:
            yield Tensor("ffn_gate_shexp", self.shared, hidden)
            yield Tensor("ffn_up_shexp", self.shared, hidden)
            yield Tensor("ffn_down_shexp", hidden, self.shared)
