"""The ONNX engine: tokens in, logits out, one run of ONNX Runtime per chunk."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.checks import check_positions, check_tokens, check_whole, divide, has_spans
from edge.backends.fixed_state import FixedState
from edge.backends.head_kv import HeadKV
from edge.backends.onnx import ENGINE
from edge.backends.onnx.calibrate import calibration_tokens, find_scales, load_scales, scale_bytes
from edge.backends.onnx.dynamic import DynamicPasses
from edge.backends.onnx.graph.attention.crossing import cross_names, make_crossing_graph
from edge.backends.onnx.inputs import Windows
from edge.backends.onnx.kv import OnnxStore
from edge.backends.onnx.memory import MOST_OBSERVED
from edge.backends.onnx.model_files import ModelFiles, find_graph, find_model_files
from edge.backends.onnx.npu.contexts import open_parts
from edge.backends.onnx.npu.form import chip_of, find_form
from edge.backends.onnx.npu.passes import StaticPasses
from edge.backends.onnx.observer import Observer
from edge.backends.onnx.providers import explained, find_provider, warn_emulated
from edge.backends.onnx.rows import LARGEST
from edge.backends.onnx.session import open_session
from edge.backends.ring import LayerKinds, Ring
from edge.backends.rope import CacheRope
from edge.errors import EngineError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.types import FloatArray, IntArray


class OnnxEngine:
    """The Engine protocol over one session. KV cache, tokens and logits lie in NumPy arrays that the session
    accesses."""

    capabilities = ENGINE.CAPABILITIES

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None
    ) -> None:
        self.spec, self.config = spec, config
        provider = find_provider(config.provider).compiling_for(chip_of(spec))
        files = find_model_files(file, spec, progress)
        self._weights = files.folder / files.data
        with open(self._weights, "rb") as data:
            self._mapped = mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ)  # as ONNX Runtime does; tells its size
        self._network = network = find_network(spec)
        form = find_form(spec, config) if provider.static else None
        positions = spec.context if config.per_head else config.capacity  # gaps stay open while the context allows
        # ONNX Runtime pairs value i of a head with value i + head / 2.
        head = max((row.key for row in network.rows if row), default=0)
        rope = CacheRope(file, network, positions, halves=True, head=head)
        kinds = LayerKinds.of(network.windows, network.rowless)
        dtype, rows, ring = config.kv_dtype, form.rows if form else None, None
        if kinds.ringed:
            ring_rows = form.ring_rows if form else kinds.ring_rows(config.capacity, config.chunk)
            ringed = OnnxStore(network, dtype, ring_rows, kinds.ringed, observes=False, rows=ring_rows)
            ring = Ring(ringed, kinds.ringed, kinds.window)
        store = OnnxStore(network, dtype, config.capacity, kinds.whole, observes=config.observes, rows=rows)
        key = f"{ENGINE.NAME}:{files.key}:{dtype}" + (f":{provider.name}" if form else "")
        state = FixedState(network.fixed_values) if any(network.fixed_values) else None
        self._kv = HeadKV(store, kinds.whole, rope, key, config.pinned, ring, state)
        self._windows = Windows(network.windows, spec.heads, store.row.heads)
        self._observed, self._crossing = 0, cast(Any, None)
        self._observer: Observer | None = None
        if config.observes:
            self._observer = Observer(network, self._kv, self._windows, MOST_OBSERVED, self._sinks(files))
            self._kv.settle = self._observer.settle
        self._passes: DynamicPasses | StaticPasses
        if provider.emulated:
            warn_emulated(spec, provider, "a token")
        if form:
            if self._windows.layers and config.per_head and not ring:
                raise UnsupportedError(
                    "static graphs have one mask for all heads, and windows in all layers would need one for each: use "
                    "--kv-policy=streaming"
                )
            self._passes = StaticPasses(file, spec, network, form, self._kv, files)
            self._passes.open(open_parts(spec, files, form, provider, config.threads, progress))
            return
        self._passes = DynamicPasses(spec, network, config, self._kv, self._windows)
        quantized = dtype in LARGEST
        known = not quantized or load_scales(self._kv, files.key)
        tokens = None if known else calibration_tokens(file, spec.vocab)
        graph = find_graph(file, spec, files, dtype, config.observes)
        self._passes.open(open_session(graph, files.folder, provider, config.threads))
        if network.crossings:
            graph = make_crossing_graph(files.layout, spec, files.data)
            self._crossing = open_session(graph, files.folder, provider, config.threads)
            self.rest()
        if tokens is not None:
            find_scales(self, files.key, tokens)
        if quantized:
            self._kv.settings += f":{zlib.crc32(scale_bytes(self._kv))}"

    def _sinks(self, files: ModelFiles) -> dict[int, FloatArray]:
        """Sinks of layers that have them, float32 [heads]."""
        places = files.layout.places
        names = {layer: f"blk.{layer}.attn_sinks" for layer in range(self.spec.layers)}
        return {
            layer: np.frombuffer(self._mapped, np.float32, self.spec.heads, places[name].offset).copy()
            for layer, name in names.items() if name in places
        }  # fmt: skip

    @property
    def kv(self) -> HeadKV[OnnxStore]:
        return self._kv

    def observe(self, queries: int, *, votes: bool = False) -> None:
        """See `ObservedEngine`; the last `queries` tokens of every chunk are observed, in `kv.attention`.

        Raises UnsupportedError if the engine was loaded without `EngineConfig.observes`.
        """
        if self._observer:
            self._observer.observe(votes=votes)
        elif queries:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        self._observed = queries

    def forward(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        tokens = self._announced(tokens, given, places)
        for part, shown in self._pieces(tokens.size, self.config.chunk, places):
            self._run(tokens[part], 1, shown, given, places and places.part(part))
        return np.asarray(self._passes.logits[0])

    def forward_all(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        tokens = self._announced(tokens, given, places)
        logits = np.empty((tokens.size, self.spec.vocab), np.float32)
        for part, shown in self._pieces(tokens.size, min(self._passes.most_logits, self.config.chunk), places):
            count = part.stop - part.start
            self._run(tokens[part], count, shown, given, places and places.part(part))
            logits[part] = self._passes.logits[:count]
        return logits

    def _announced(self, tokens: IntArray, given: GivenRows | None, places: Places | None) -> IntArray:
        """The checked tokens. Raises UnsupportedError for rows and places that graphs do not know."""
        tokens = check_tokens(tokens, self.spec.vocab, self._kv.free, given)
        if places is None:
            self._kv.announce(tokens.size)
        else:
            if self._observed and has_spans(places):
                raise UnsupportedError(
                    "the onnx engine observes no pictures that see all of themselves: use a KV policy without attention"
                )
            masked = isinstance(self._passes, StaticPasses) or self._network.whole_pictures
            divide("onnx", self._kv, self._network, tokens.size, tokens.size, places, whole=masked)
        return tokens

    def set_crossed(self, states: FloatArray) -> None:
        """See CrossEngine."""
        if self._kv.closed:
            raise EngineError("the engine is closed")
        if len(states) > max(1, self.config.crossed):
            raise EngineError(f"{len(states)} states to read across, and there is room for {self.config.crossed}")
        self._across.clear()  # the rows before make room
        names = [name for layer in self._network.crossings for name in cross_names(layer)]
        with explained("ONNX Runtime failed"):
            found = self._crossing.run(names, {"states": np.ascontiguousarray(states, np.float32)[None]})
        self._across.update(zip(names, found, strict=True))

    def crossed(self, layer: int) -> tuple[FloatArray, FloatArray]:
        """See CrossEngine."""
        keys, values = (self._across[name][0] for name in cross_names(layer))
        return keys, values

    def rest(self) -> None:
        """See CrossEngine. One state of zeros remains, so that there is something to attend to."""
        self.set_crossed(np.zeros((1, self.spec.hidden), np.float32))

    @property
    def _across(self) -> dict[str, FloatArray]:
        assert isinstance(self._passes, DynamicPasses)
        return self._passes.across

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self._passes.close()
        self._crossing = None
        self._mapped.close()
        self._kv.closed, self._kv.settle, self._observer = True, lambda: None, None
        for store in self._kv.stores:
            store.close()

    def run_shown(self, tokens: IntArray) -> Mapping[int, FloatArray]:
        """Run at most MOST_OBSERVED tokens; return queries, keys and values before RoPE by layer, float32 [n, all
        heads]."""
        assert isinstance(self._passes, DynamicPasses)
        self._run(tokens, 1, tokens.size)
        return self._passes.shown(tokens.size)

    def _pieces(self, count: int, step: int, places: Places | None = None) -> Iterator[tuple[slice, int]]:
        """Parts of `count` tokens that run at once, with the bounded number of observed tokens at the end of each. None
        is observed where there are spans, which are not divided."""
        if places is not None and has_spans(places):
            yield from ((part, 0) for part in places.passes(min(self._passes.most, step)))
            return
        # Once heads keep different rows, each needs a window's mask of its own, which takes memory.
        alike = self._kv.alike or self._kv.ring or not self._windows.layers
        step = min(step, self._passes.most if alike else MOST_OBSERVED)
        for start in range(0, count, step):
            stop = min(start + step, count)
            shown = min(self._observed, stop - start)
            if shown <= MOST_OBSERVED:
                yield slice(start, stop), shown
                continue
            if start < stop - shown:
                yield slice(start, stop - shown), 0
            for first in range(stop - shown, stop, MOST_OBSERVED):
                part = slice(first, min(first + MOST_OBSERVED, stop))
                yield part, part.stop - part.start

    def _run(
        self, tokens: IntArray, wanted: int, shown: int, given: GivenRows | None = None, places: Places | None = None
    ) -> None:
        kv, count = self._kv, tokens.size
        if kv.closed:
            raise EngineError("the engine is closed")
        check_positions(self.spec, kv.next_position + count)
        check_whole(self._weights, self._mapped.size(), len(self._mapped))
        kv.prepare(count)
        self._passes.run(tokens, wanted, shown, given, places)
        kv.appended(count, places)
        if shown and self._observer:
            self._observer.add(self._passes.queries(shown), shown)
