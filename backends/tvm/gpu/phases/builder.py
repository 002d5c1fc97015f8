"""A pass under construction: its dispatches, and the products into and out of a core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from edge.backends.tvm.gpu.adapters import LowRank
from edge.backends.tvm.gpu.design import Design
from edge.backends.tvm.gpu.kernels.norms import Norm, add_normed, clip, normalise
from edge.backends.tvm.gpu.kernels.products.products import Epilogue, Factor, Product, Residual
from edge.backends.tvm.gpu.kernels.products.steps import step
from edge.backends.tvm.gpu.kernels.products.tiles import chunk
from edge.backends.tvm.gpu.kernels.threads import Built
from edge.backends.tvm.gpu.lowering import lower
from edge.backends.tvm.gpu.program import Dispatch, Kernel, Slice
from edge.backends.tvm.gpu.weights import LayerLayout, Vector
from edge.model.structure.layers import Block


class Kernels:
    """A cache of kernels, each built once. by_name: all kernels so far."""

    def __init__(self, language: str) -> None:
        self.by_name: dict[str, Kernel] = {}
        self._language = language
        self._built: dict[tuple[object, ...], Built] = {}

    def find(self, key: tuple[object, ...], make: Callable[[str], Built]) -> Built:
        """Find or build a kernel. key: everything that it depends on, its name first; `make` receives a unique name."""
        if key not in self._built:
            alike = sum(other[0] == key[0] for other in self._built)
            built = self._built[key] = make(f"{key[0]}_{alike}" if alike else str(key[0]))
            self.by_name[built.name] = lower(built, self._language)
        return self._built[key]


class PassBuilder:
    """Collects the dispatches of a pass.

    single: it runs one token, or up to `tokens` as if each alone. long: behind many rows (`Design.long_layers`).
    observed: attention is accumulated. tables: of the kernels.
    hidden: the buffer of the hidden states. residual: a pending addition to them: the norm and its weights, for values
    in `normed`. is_normed: `normed` has the normalized rows that parallel blocks share.
    """

    def __init__(
        self, design: Design, kernels: Kernels, *, single: bool = False, long: bool = False, observed: bool = False,
        tokens: int = 1,
    ) -> None:  # fmt: skip
        self.design, self.dispatches, self.observed = design, list[Dispatch](), observed
        self.single, self.long, self.tokens = single, long, tokens
        self.tables = replace(design.tables, alone=tokens > 1)
        self.hidden, self.is_normed = "x", False
        self.residual: tuple[Residual, str] | None = None
        self._kernels = kernels

    def layout(self, layer: int) -> LayerLayout:
        return self.design.weights.layers[layer]

    def factors(self, names: Sequence[str], layer: int) -> tuple[Factor, ...]:
        """Matrices whose results are concatenated."""
        layout = self.layout(layer)
        starts = accumulate((layout.matrix(name).rows for name in names), initial=0)
        return tuple(Factor.of(layout, name, at) for name, at in zip(names, starts, strict=False))

    def add(
        self, phase: str, layer: int | None, key: tuple[object, ...], make: Callable[[str], Built],
        buffers: Mapping[str, str | Slice], scalars: Mapping[str, int] | None = None,
        names: tuple[str, ...] = (), adapted: bool | None = None,
    ) -> None:  # fmt: skip
        """Add a dispatch. key, make: as in `Kernels.find`. buffers: names of buffers where they differ from the
        parameters'. names, adapted: `Dispatch.product`, `Dispatch.adapted`."""
        built = self._kernels.find(key, make)
        found = (buffers.get(name, name) for name in built.buffers)
        slices = tuple(each if isinstance(each, Slice) else Slice(each) for each in found)
        values = tuple((scalars or {})[name] for name in built.scalars)
        self.dispatches.append(
            Dispatch(built.name, slices, values, built.groups, phase, layer, built.per, names, adapted)
        )

    def multiply_hidden(
        self, phase: str, layer: int, block: Block, name: str, factors: tuple[Factor, ...], epilogue: Epilogue,
        out: str, inputs: Slice | None = None,
    ) -> None:  # fmt: skip
        """Multiply matrices by the block's normalized rows. For a single token this adds a pending residual; since
        every workgroup reads the hidden states, the sums go to another buffer. inputs: of the epilogue."""
        norm = None if self.is_normed else Norm.of(self.layout(layer), block.norm, self.design.shape)
        product = Product(name, factors, epilogue, norm)
        x = "normed" if self.is_normed else self.hidden
        buffers: dict[str, str | Slice] = {"x": x, "out": out} | ({"inputs": inputs} if inputs else {})
        if norm and not self.single:
            self.normalise(norm, layer, self.hidden, "normed")
            buffers["x"] = "normed"
            self.clip(layer, block.core.inputs[0], "normed", self.design.shape.padded_hidden)
        if self.residual:
            residual, after = self.residual
            self.hidden, self.residual = "x" if self.hidden == "other x" else "other x", None
            product = replace(product, residual=residual)
            buffers |= {"raw": "normed", "residual_w4": after, "sums": self.hidden}
        self.multiply(phase, layer, product, buffers)

    def multiply_into_hidden(self, phase: str, layer: int, block: Block, name: str, source: str) -> None:
        """Add the block's output projection to the hidden states. A post-norm becomes part of the next product for a
        single token, and a dispatch of its own in a chunk."""
        layout, shape = self.layout(layer), self.design.shape
        after = Norm.of(layout, block.post_norm, shape) if block.post_norm else None
        epilogue = Epilogue("store" if after else "add", shape.padded_hidden, 1.0 if after else block.scale)
        self.clip(layer, block.core.output, source, layout.matrix(block.core.output).columns)
        product = Product(name, (Factor.of(layout, block.core.output),), epilogue, after=after)
        self.multiply(phase, layer, product, {"x": source, "out": "normed" if after else self.hidden})
        if block.held:
            assert after
            self.normalise(after, layer, "normed", "held")
            return
        if after:
            self.residual = Residual(after, block.scale), f"layer.{layer}"
        rescale = layout.vector(block.rescale) if block.rescale else None
        assert after or not rescale
        if rescale or not self.single:
            self.add_residual(layer, rescale)

    def add_residual(self, layer: int, rescale: Vector | None = None) -> None:
        """Add a pending residual by a dispatch of its own. rescale: of the block that it comes from."""
        if not self.residual:
            return
        (residual, weights), self.residual = self.residual, None
        self.add_normed(residual, layer, weights, "normed", self.hidden, rescale)

    def add_normed(
        self, residual: Residual, layer: int, weights: str, x: str, out: str, rescale: Vector | None = None
    ) -> None:
        """Add a norm of the rows of a buffer to those of another."""
        tokens = self.design.chunk
        self.add(
            "norm", layer, ("edge_add_normed", residual, rescale),
            lambda name: add_normed(name, residual.norm, tokens, residual.scale, rescale),
            weights_in(weights) | {"x": x, "out": out},
        )  # fmt: skip

    def normalise_hidden(self, layer: int, block: Block) -> None:
        """Fill `normed` with the block's normalized rows, for several products; in a step, too."""
        self.add_residual(layer)
        norm = Norm.of(self.layout(layer), block.norm, self.design.shape)
        assert norm
        self.normalise(norm, layer, self.hidden, "normed")

    def normalise(self, norm: Norm, layer: int, x: str, out: str) -> None:
        buffers, tokens = weights_in(f"layer.{layer}") | {"x": x, "out": out}, self.design.chunk
        self.add("norm", layer, ("edge_norm", norm), lambda name: normalise(name, norm, tokens), buffers)

    def clip(self, layer: int, name: str, x: str, stride: int) -> None:
        """Clip the inputs of a matrix, rows of `stride` values, if it has bounds."""
        if bounds := self.layout(layer).bounds(name, "input"):
            buffers, tokens = weights_in(f"layer.{layer}") | {"out": x}, self.design.chunk
            key = ("edge_clip", bounds, stride)
            self.add("norm", layer, key, lambda made: clip(made, bounds, stride, tokens), buffers)

    def multiply(self, phase: str, layer: int | None, product: Product, buffers: Mapping[str, str | Slice]) -> None:
        """Add a product with matrices of the layer or, without one, of `rest`."""
        lows = self._low_ranks(layer, product)
        names = tuple(low.name for low in lows)
        self._multiply(phase, layer, product, buffers, names, False if lows else None)
        if lows:
            self._multiply_adapted(phase, layer, product, lows, buffers)

    def _low_ranks(self, layer: int | None, product: Product) -> list[LowRank]:
        """The adapters that the factors may have."""
        if layer is None or product.per_head:
            return []
        layout, adapters = self.layout(layer), self.design.adapters
        places = {layout.matrix(name): low for name, low in adapters.layer(layout).items()}
        return [places[factor.matrix] for factor in product.factors if places]

    def _multiply_adapted(
        self, phase: str, layer: int | None, product: Product, lows: Sequence[LowRank],
        buffers: Mapping[str, str | Slice],
    ) -> None:  # fmt: skip
        """Add the product A x for all matrices, then the product itself with B · (A x) added. The first one adds a
        pending residual for both."""
        names, rank = tuple(low.name for low in lows), self.design.adapters.rank
        factors = tuple(Factor(low.a, at=number * rank) for number, low in enumerate(lows))
        first = replace(
            product, name="edge_adapt", factors=factors, epilogue=Epilogue("store", rank * len(lows)),
            norm_in_rest=product.norm is not None, after=None,
        )  # fmt: skip
        in_first = {**weights_in(f"lora.{layer}"), "rest": f"layer.{layer}", **buffers, "out": "low"}
        self._multiply(phase, layer, first, in_first, names, True)
        adapted = tuple(replace(factor, low=low) for factor, low in zip(product.factors, lows, strict=True))
        x = buffers["sums"] if product.residual else buffers["x"]
        second = replace(product, factors=adapted, residual=None)
        self._multiply(phase, layer, second, {**buffers, "x": x, "lora4": f"lora.{layer}"}, names, True)

    def _multiply(
        self, phase: str, layer: int | None, product: Product, buffers: Mapping[str, str | Slice],
        names: tuple[str, ...], adapted: bool | None,
    ) -> None:  # fmt: skip
        design = self.design

        def make(name: str) -> Built:
            named = replace(product, name=name)
            if self.single:
                return step(named, design.tuning, tokens=self.tokens)
            return chunk(named, design.tuning, design.chunk)

        of = "_batch" if self.tokens > 1 else "" if self.single else "_chunk"
        key = (f"{product.name}{of}", product)
        weights = weights_in("rest" if layer is None else f"layer.{layer}")
        self.add(phase, layer, key, make, {**weights, **buffers}, names=names, adapted=adapted)


def weights_in(buffer: str) -> dict[str, str]:
    return {"w4": buffer, "w1": buffer}
