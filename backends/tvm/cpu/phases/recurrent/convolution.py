"""The causal convolution of recurrent cores (`ssm_conv1d`), followed by SiLU, whose last inputs begin the state."""

from __future__ import annotations

from dataclasses import dataclass

from edge.backends.tvm.cpu.arguments import Job
from edge.backends.tvm.cpu.kernels.functions import silu
from edge.backends.tvm.cpu.kernels.vectors import Register, Value, floats, i64, let, load, loop, store, when
from edge.backends.tvm.cpu.phases.builder import PassBuilder
from edge.backends.tvm.cpu.phases.project import project
from edge.backends.tvm.cpu.phases.recurrent.states import sequences, state_at, unless_verified
from edge.backends.tvm.packing.cores import round_up


@dataclass(frozen=True)
class Convolution:
    """Token t's inputs lie at `first` + t · `stride` of the activations.

    mixed: channels. kernel: tokens that it sees. taps: names of matrices of equal shares of the channels.
    """

    b: PassBuilder
    layer: Value
    mixed: int
    kernel: int
    first: Value
    stride: int
    taps: tuple[str, ...] = ("ssm_conv1d",)

    def run(self, begin: Value, token: Value, channel: Value, count: int, out: Value, share: int = 0) -> None:
        """SiLU of the convolution of `count` channels. begin: the first token of the token's sequence. share: of the
        channels, to which these belong."""
        b, state = self.b, state_at(self.b, self.layer, begin)
        share %= len(self.taps)
        taps = let(b.layer_at(self.layer, self.taps[share]) - 4 * self.kernel * share * (self.mixed // len(self.taps)))
        mixed = Register()
        with loop(i64(0), i64(count // 16)) as part:
            at = let(channel + part * 16)
            weights = let(taps // 4 + at * self.kernel)  # [tiles, kernel, 16] floats
            if "ssm_conv1d.bias" in b.names:
                mixed.value = load(b.weights.floats, b.layer_at(self.layer, "ssm_conv1d.bias") + at)
            else:
                mixed.value = floats(0)
            for tap in range(self.kernel):
                weight = let(load(b.weights.floats, weights + tap * 16))
                source = let(token + tap - (self.kernel - 1))
                with when(source >= begin):
                    mixed.value = mixed.value + weight * load(b.floats, self.first + source * self.stride + at)
                with when(source < begin):
                    row = source - begin + (self.kernel - 1)
                    mixed.value = mixed.value + weight * load(b.states, state + row * self.mixed + at)
            store(b.floats, out + part * 16, silu(mixed.value))

    def apply(self, name: str) -> None:
        """If drafts are applied, run `keep_inputs` in a phase of its own."""
        b = self.b
        if b.forgets:
            with when(b.drafts == Job.APPLIED), b.phase(name, self.layer):
                self.keep_inputs()

    def output(self, group: str) -> None:
        """The unit that ends the block: keep the last inputs, and add the output projection of the rows `mixed`."""
        width = round_up(self.b.block.core.width, 32)
        project(self.b, self.layer, "mixed", width, group, first=lambda _b, _layer: self.keep_inputs())

    def keep_inputs(self) -> None:
        """Write the last inputs to the state, for the thread's share of the channels, unless they are drafts."""
        b = self.b
        with unless_verified(b), b.tiles(self.mixed // 16) as tile, sequences(b) as (begin, stop):
            state = state_at(b, self.layer, begin)
            for row in range(self.kernel - 1):
                target, token = let(state + row * self.mixed + tile * 16), let(stop - (self.kernel - 1) + row)
                with when(token >= begin):
                    store(b.states, target, load(b.floats, self.first + token * self.stride + tile * 16))
                with when(token < begin):
                    store(b.states, target, load(b.states, target + (stop - begin) * self.mixed))
