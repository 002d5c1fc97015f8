"""KV rows between a page's module and its GPU: what the C runtime and the GPU engine have, by their NumPy forms."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.backends.tvm.gpu.design import RowForm
from edge.backends.tvm.gpu.kv import to_memory
from edge.backends.tvm.kv.regions import TILE
from edge.backends.tvm.kv.row_formats import FORMATS, encode, pack_keys
from edge.types import AnyArray

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no Node")

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "edge" / "apps" / "web" / "package" / "rows.js"
ROWS, FIRST = 48, 1


def as_bytes(data: AnyArray) -> list[int]:
    found: list[int] = np.ascontiguousarray(data).view(np.uint8).reshape(-1).tolist()
    return found


def in_tiles(data: AnyArray) -> AnyArray:
    """[rows, width] as the module has keys and scales: [rows / 16, width, 16]."""
    return data.reshape(ROWS // TILE, TILE, -1).swapaxes(1, 2)


def packed_values(dtype: str, codes: AnyArray) -> AnyArray:
    """As the module has them: of 4 bits, those of the first half of 32 values, or of the last 16, in the low halves."""
    if dtype != "int4":
        return codes
    parts = [codes[:, start : start + 32] for start in range(0, codes.shape[1], 32)]
    halves = [np.split(part, 2, axis=1) for part in parts]
    return np.concatenate([low | high << 4 for low, high in halves], axis=1)


def test_rows_travel_as_both_sides_have_them() -> None:
    """Rotated halves are neighbours in the module; of 4 bits, heads of 16 values are padded on the device."""
    cases: list[dict[str, Any]] = []
    orders = []
    for dtype, head, rotated in (
        ("int4", 16, 16), ("int4", 64, 64), ("int4", 32, 0), ("int4", 48, 0), ("int8", 64, 32), ("f16", 48, 48),
        ("f32", 16, 16),
    ):  # fmt: skip
        form, rows = RowForm(dtype, head), np.random.default_rng(head).standard_normal((2, ROWS, head))
        (keys, values), (key_scales, value_scales) = encode(dtype, rows.astype(np.float32))
        there, half = np.arange(head), rotated // 2  # of a value on the device, its place in the module
        there[:rotated] = np.arange(rotated).reshape(half, 2).T.reshape(-1)
        on_device = to_memory(form, keys[:, there]).reshape(ROWS // TILE, TILE, form.units, 16).swapaxes(1, 2)
        module = [in_tiles(pack_keys(dtype, keys)), packed_values(dtype, values)]
        device = [on_device, to_memory(form, values)]
        if form.scaled:
            module += [in_tiles(key_scales), in_tiles(value_scales)]
            device.append(np.stack([key_scales, value_scales], axis=1))
        orders.append(there.tolist())
        cases.append({
            "form": {
                "head": head, "bytes": 4 * form.words, "reflected": FORMATS[dtype].transformed,
                "interleaved": rotated, "scaled": form.scaled, "buffers": [0, 1, 2][: len(device)], "heads": [0],
            },
            "rows": ROWS, "first": FIRST, "module": [*map(as_bytes, module)], "device": [*map(as_bytes, device)],
        })  # fmt: skip
    command = ["node", str(HERE / "gpu_rows.mjs"), SCRIPT.as_uri()]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=True)
    for case, order, found in zip(cases, orders, json.loads(done.stdout), strict=True):
        skipped = [len(part) // ROWS * TILE * FIRST for part in case["device"]]
        assert found["loaded"] == [[at, part[at:]] for at, part in zip(skipped, case["device"], strict=True)]
        assert found["stored"] == case["module"]
        assert found["normals"] == order
