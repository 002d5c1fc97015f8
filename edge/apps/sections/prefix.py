"""Section PREFIX of model.edge: a soft prompt's KV rows as the cache stores them, with which every conversation begins.

Rows of prefix tuning are in PEFT's file. Those of prompt tuning do not depend on any text: the model runs them once,
when it is exported.
"""

from __future__ import annotations

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.tvm.engine import NativeEngine
from edge.errors import UnsupportedError
from edge.model.adapters.prefix import PrefixFile, row_of
from edge.model.model import Model
from edge.model.structure.spec import ModelSpec

_ARRAYS = ("keys", "values", "key_scales", "value_scales")  # in the order of rows_save in runtime/kv/rows.c


def check_prefix(prefix: PrefixFile, spec: ModelSpec, *, accelerated: bool, adapted: bool) -> None:
    """Raise UnsupportedError for models and bundles that cannot begin with rows, InputError for another model's."""
    prefix.check_model(spec)
    if accelerated:
        raise UnsupportedError("a bundle with --prefix runs on the CPU: leave --gpu and --npu out")
    if adapted and not prefix.keys:
        raise UnsupportedError(
            "the rows of a --prefix of prompt tuning are computed at the export, and adapters would change them: leave "
            "--lora-rank out"
        )
    try:
        row_of(spec)
    except UnsupportedError:
        raise UnsupportedError(
            f"a bundle with --prefix needs rows of all tokens in all layers, and {spec.name} has windows, states or "
            "other rows: leave --prefix out"
        ) from None


def prefix_section(prefix: PrefixFile, model: Model, config: EngineConfig) -> bytes:
    """The rows of each head, one after the other. config: of the plan, on this machine."""
    opened = prefix.open(model.spec)
    engine = NativeEngine(model.file, model.spec, config)
    try:
        for first in range(0, prefix.size, config.chunk):
            part = slice(first, first + config.chunk)
            if opened.saved:
                engine.append_rows(opened.rows[:, :, :, part])
            else:
                engine.forward(opened.ids[part], opened.given)
        store = engine.kv.store
        rows = store.regions.rows(np.arange(prefix.size))
        store.rows.give_means(rows, store.heads)
        found = [np.ascontiguousarray(store.rows.gather(name, rows)) for name in _ARRAYS if store.rows.width(name)]
        parts = [each.view(np.uint8).reshape(*rows.shape, -1) for each in found]
        return np.concatenate(parts, axis=-1).tobytes()
    finally:
        engine.close()
