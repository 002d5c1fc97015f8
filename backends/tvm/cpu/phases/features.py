"""The input of an EAGLE-3 head (`edge.model.cores.Features`). The engine has put embeddings where hidden states go, and
features of the model into `features`, from which `fuse` makes what `join` reads; or states of the head into `given`."""

from __future__ import annotations

from edge.backends.tvm.cpu.kernels.functions import NORMS
from edge.backends.tvm.cpu.kernels.vectors import Value, i64, let, load, loop, store, when
from edge.backends.tvm.cpu.phases.builder import PassBuilder, Unit
from edge.model.cores import Features


def fuse(b: PassBuilder, layer: Value) -> None:
    """given = `fc` · features, if there are any."""
    core, hidden = b.block.core, b.shape.hidden
    with when(b.at("fuses") > 0):
        b.quantize_chunk("features", core.width, layer, "fuse")
        with b.phase("fuse", layer):
            inputs = b.quantized_inputs("features", core.width, layer, "fuse", private=False)
            with b.tiles(hidden // 16) as tile, b.batches() as tokens:
                sums = b.product(core.output, layer, tile, inputs, b.rows(tokens))
                for token, each in zip(tokens, sums, strict=True):
                    store(b.floats, b.at("given") + token * hidden + tile * 16, each.value)


def join(b: PassBuilder, layer: Value) -> None:
    core, hidden = b.block.core, b.shape.hidden
    assert isinstance(core, Features)
    with b.phase("join", layer), b.shared_out(b.count) as token:
        x, given = (let(b.at(name) + token * hidden) for name in ("x", "given"))
        joined = let(b.at("joined") + token * 2 * hidden)
        for half, (name, source) in enumerate((("attn_norm", x), ("attn_norm_2", given))):
            NORMS[b.shape.norm](
                b.floats, source, b.weights.floats, let(b.layer_at(layer, name)), None, hidden, hidden,
                b.shape.norm_eps, b.floats, let(joined + half * hidden),
            )  # fmt: skip
        source = let(joined + hidden) if core.normed else given
        with loop(i64(0), i64(hidden // 16)) as part:
            store(b.floats, x + part * 16, load(b.floats, source + part * 16))


UNITS: dict[str, Unit] = {"fuse": fuse, "join": join}
