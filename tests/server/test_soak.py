"""A soak in small: benchmarks/soak.py has ten thousand requests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN

from edge.budget import parse_bytes


def load_soak() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("requests", [40, pytest.param(400, marks=pytest.mark.exhaustive)])
@pytest.mark.skipif(sys.platform != "linux", reason="the resident set of another process is read from /proc")
def test_memory_holds_whatever_clients_send(requests: int) -> None:
    models = [str(GOLDEN / f"{name}.gguf") for name in ("llama-gqa-tied", "qwen2")]
    found = load_soak().soak(
        models, requests, "256MiB", "--backend", "reference", "--max-kv-size", "256", clients=4,
    )  # fmt: skip
    assert found["requests"] == requests
    assert found["peak"] <= parse_bytes("256MiB")
    assert not any(kind.endswith(" 500") for kind in found["seen"])
