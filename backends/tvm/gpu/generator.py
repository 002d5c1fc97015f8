"""The whole pass of a model, tokens to logits, as dispatches of kernels.

A step runs one token (decode), a chunk several (prefill).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from edge.backends.ring import LayerKinds
from edge.backends.tvm.gpu import picking
from edge.backends.tvm.gpu.design import Design
from edge.backends.tvm.gpu.kernels import pick
from edge.backends.tvm.gpu.kernels.attention import attend
from edge.backends.tvm.gpu.kernels.embed import embed
from edge.backends.tvm.gpu.kernels.norms import Norm, add_normed, normalise
from edge.backends.tvm.gpu.kernels.observe import observe
from edge.backends.tvm.gpu.kernels.products import Product, Residual, head_products, layer_products, step
from edge.backends.tvm.gpu.kernels.rows import Heads, move, store_rows
from edge.backends.tvm.gpu.kernels.threads import Built
from edge.backends.tvm.gpu.kernels.tiles import chunk
from edge.backends.tvm.gpu.lowering import lower
from edge.backends.tvm.gpu.program import Dispatch, Kernel, Program, Slice

_INPUTS = {"output": "mixed", "down": "ffn"}  # of the products that do not read the hidden states
_OUTPUTS = {"qkv": "qkv", "gate-up": "ffn"}  # of the products that do not add to them
_KEYS = {"keys4": "keys"}  # a buffer that a kernel reads under another type


def generate(design: Design) -> Program:
    """Passes: step; chunk, whose logits `last` or `rows` compute, of one token or of State.WANTED; behind them
    `picked` or `top` (picking.py). With `Design.observes` also `observed step` and `observed chunk`."""
    kernels = _Kernels(design.language)
    makers = {"step": _step, "chunk": _chunk, "last": _last, "rows": _rows}
    passes = {}
    for name, make in makers.items():
        make(made := _Pass(design, kernels))
        passes[name] = tuple(made.dispatches)
    if design.observes:
        for name, make in {"observed step": _step, "observed chunk": _chunk}.items():
            make(made := _Pass(design, kernels, observed=True))
            passes[name] = tuple(made.dispatches)
    for built in (move("edge_move", design.kv_dtype, design.shape.padded_head), *pick.kernels()):
        kernels.find((built.name,), lambda _, built=built: built)  # type: ignore[misc]
    logits = Slice("logits")
    passes["picked"] = picking.argmax(design.shape.vocab, design.chunk, logits)
    passes["top"] = picking.top(design.shape.vocab, logits)
    return Program(design.language, kernels.by_name, design.buffers(0), passes)


class _Kernels:
    """Kernels, each built once. by_name: of all that were asked for."""

    def __init__(self, language: str) -> None:
        self.by_name: dict[str, Kernel] = {}
        self._language = language
        self._built: dict[tuple[object, ...], Built] = {}

    def find(self, key: tuple[object, ...], make: Callable[[str], Built]) -> Built:
        """key: all that the kernel depends on, first of all its name; `make` gets one that no other kernel has."""
        if key not in self._built:
            alike = sum(other[0] == key[0] for other in self._built)
            built = self._built[key] = make(f"{key[0]}_{alike}" if alike else str(key[0]))
            self.by_name[built.name] = lower(built, self._language)
        return self._built[key]


class _Pass:
    """Collects the dispatches of a pass. observed: attention is added up. hidden: the buffer of the hidden states.
    residual: what shall be added to them, which is in `normed`, and the weights of its norm.
    """

    def __init__(self, design: Design, kernels: _Kernels, *, observed: bool = False) -> None:
        self.design, self.dispatches, self.observed = design, list[Dispatch](), observed
        self.hidden = "x"
        self.residual: tuple[Residual, str] | None = None
        self._kernels = kernels

    def add(
        self, phase: str, layer: int | None, key: tuple[object, ...], make: Callable[[str], Built],
        buffers: Mapping[str, str], scalars: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """key, make: as in `_Kernels.find`. buffers: those of the kernel's parameters that have other names."""
        built = self._kernels.find(key, make)
        slices = tuple(Slice(buffers.get(name, name)) for name in built.buffers)
        values = tuple((scalars or {})[name] for name in built.scalars)
        self.dispatches.append(Dispatch(built.name, slices, values, built.groups, phase, layer, built.per))


def _step(made: _Pass) -> None:
    design = made.design
    _embed(made)
    for layer, layout in enumerate(design.weights.layers):
        products = layer_products(layout, design.shape)
        for phase in ("qkv", "output", "gate-up", "down"):
            _product(made, products[phase], phase, layer, lambda each: step(each, design.tuning))
            if phase == "qkv":
                _attend(made, layer, single=True)
    if made.residual:
        _add_residual(made, len(design.weights.layers) - 1)
    _last(made)


def _chunk(made: _Pass) -> None:
    design = made.design
    _embed(made)
    for layer, layout in enumerate(design.weights.layers):
        products = layer_products(layout, design.shape)
        for phase in ("qkv", "output", "gate-up", "down"):
            product = products[phase]
            if product.norm:
                norm, buffers = product.norm, _weights(f"layer.{layer}") | {"out": "normed"}
                made.add("norm", layer, ("edge_norm", norm), _normalise(norm, design.chunk), buffers)
            _product(made, product, phase, layer, lambda each: chunk(each, design.tuning, design.chunk), chunked=True)
            if phase == "qkv":
                _attend(made, layer)


def _last(made: _Pass) -> None:
    """Logits of a pass's last token, if they are wanted."""
    design = made.design
    for piece, product in head_products(design.weights, design.shape):
        buffers = _weights(piece.buffer) | {"x": made.hidden, "out": "logits"}
        made.add(
            "head",
            None,
            ("edge_head", product),
            _named(product, lambda each: step(each, design.tuning, last=True)),
            buffers,
        )


def _rows(made: _Pass) -> None:
    """Logits of the last State.WANTED tokens of a pass."""
    design = made.design
    heads = head_products(design.weights, design.shape)
    if norm := heads[0][1].norm:
        normalised = _normalise(norm, design.logits_rows, wanted=True)
        made.add("head", None, ("edge_norm_wanted", norm), normalised, {"w1": "rest", "out": "normed"})
    for piece, product in heads:
        buffers = _weights(piece.buffer) | {"x": "normed" if norm else "x", "out": "logits"}
        made.add(
            "head", None, ("edge_head_chunk", product),
            _named(product, lambda each: chunk(each, design.tuning, design.logits_rows, wanted=True)), buffers,
        )  # fmt: skip


def _embed(made: _Pass) -> None:
    design = made.design
    positions = design.weights.rest.matrix("position_embd") if design.learned else None
    for piece in design.weights.embedding:

        def make(name: str, piece: Any = piece) -> Built:
            return embed(name, piece, design.chunk, design.shape.embedding_scale, positions)

        buffers = _weights(piece.buffer) | {"out": "x", "r4": "rest", "r1": "rest"}
        made.add("embed", None, ("edge_embed", piece), make, buffers)


def _product(
    made: _Pass, product: Product, phase: str, layer: int, make: Callable[[Product], Built], *, chunked: bool = False
) -> None:
    """A product of a layer. A norm behind it, whose result is added to the hidden states, is part of the next product
    in a step; since every workgroup of that reads them, it writes the sums to another buffer.
    """
    weights = _weights(f"layer.{layer}")
    source = "normed" if chunked and product.norm else _INPUTS.get(phase, made.hidden)
    buffers = weights | {"x": source, "out": "normed" if product.after else _OUTPUTS.get(phase, made.hidden)}
    if made.residual and phase not in _INPUTS:
        residual, after = made.residual
        made.hidden, made.residual = "x" if made.hidden == "other x" else "other x", None
        product = replace(product, residual=residual)
        buffers |= {"raw": "normed", "residual_w4": after, "sums": made.hidden}
    key = (f"{product.name}_chunk" if chunked else product.name, product)
    made.add(phase, layer, key, _named(product, make), buffers)
    if product.after:
        made.residual = Residual(product.after, made.design.shape.residual_scale), f"layer.{layer}"
        if chunked:
            _add_residual(made, layer)


def _add_residual(made: _Pass, layer: int) -> None:
    """In a dispatch of its own."""
    assert made.residual
    (residual, weights), made.residual = made.residual, None

    def make(name: str) -> Built:
        return add_normed(name, residual.norm, made.design.chunk, residual.scale)

    buffers = _weights(weights) | {"x": "normed", "out": made.hidden}
    made.add("norm", layer, ("edge_add_normed", residual), make, buffers)


def _attend(made: _Pass, layer: int, *, single: bool = False) -> None:
    """single: a step; its attention stores the row."""
    design, shape, tables = made.design, made.design.shape, made.design.tables
    heads, form = Heads.of(design, layer), (shape, tables, design.tuning, design.kv_dtype)
    scalars = {"layer": layer, "angles": tables.angle_row(design.kinds[layer]), "window": design.windows[layer]}
    buffers = _weights(f"layer.{layer}") | _KEYS
    if single and not design.observes:
        fused = ("edge_attend_step", heads.norms)
        made.add("attend", layer, fused, lambda name: attend(name, *form, tokens=1, heads=heads), buffers, scalars)
        return

    def make_store(name: str) -> Built:
        return store_rows(name, heads, tokens=design.chunk, observes=design.observes)

    def make_attend(name: str) -> Built:
        return attend(name, *form, tokens=design.chunk, observes=design.observes)

    made.add("qkv", layer, ("edge_store_rows", heads.norms), make_store, buffers, scalars)
    made.add("attend", layer, ("edge_attend",), make_attend, _KEYS, scalars)
    if made.observed and layer in LayerKinds.of(design.windows).whole:
        made.add("attend", layer, ("edge_observe",), lambda name: observe(name, *form), _KEYS, scalars)


def _normalise(norm: Norm, tokens: int, *, wanted: bool = False) -> Callable[[str], Built]:
    return lambda name: normalise(name, norm, tokens, wanted=wanted)


def _named(product: Product, make: Callable[[Product], Built]) -> Callable[[str], Built]:
    return lambda name: make(replace(product, name=name))


def _weights(buffer: str) -> dict[str, str]:
    return {"w4": buffer, "w1": buffer}
