"""`edge plan --image`: what a picture costs is known by its size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN
from golden_models import SOME_GPU, on_gpu
from test_cli import edge, edge_here
from test_cli import json_here as edge_json

PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
PLAN = ("plan", str(GOLDEN / "eyes" / "smolvlm.gguf"), "--mmproj", str(GOLDEN / "eyes" / "mmproj.gguf"), "--image")


def test_each_size_has_its_rows_memory_and_time(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    PIL.fromarray(np.zeros((30, 44, 3), np.uint8)).save(file)
    found, of_file = (
        edge_json(*PLAN, each, "--json", "--device", "raspberry-pi-5")["image"] for each in ("44x30", str(file))
    )
    assert [each["encoder"] for each in found["sizes"]] == [each["encoder"] for each in of_file["sizes"]]
    small, large = found["sizes"]
    assert [(each["tokens"], each["patches"], each["tiles"]) for each in (small, large)] == [(4, 16, 1), (20, 80, 5)]
    parameters, layers, hidden = 4 * 24 * 24 + 2 * 24 * 40, 1, 24
    ends = 16 * 24 * 3 * 8**2 + 4 * 32 * 4 * 24  # stem, of each patch; projector, of each row
    assert small["flops"] == 2 * (parameters * 16 + ends) + 4 * layers * 16**2 * hidden
    assert large["flops"] == 5 * small["flops"]
    assert small["peak"] >= small["encoder"] > found["weights"] > 0
    assert large["first_token_s"] > large["seconds"] > small["seconds"]
    assert "20 tokens" in edge_here(*PLAN, "44x30", "--device", "raspberry-pi-5").stdout
    unknown = edge(*PLAN, "44x30", "--device", "generic-x86", "--memory", "1GiB").stdout
    assert "are in memory while it encodes; its time is not known\n" in unknown


@pytest.mark.parametrize(("limit", "most", "why"), [
    ((), 20, "default"), (("--time", "1s"), 20, "default"), (("--time", "0.001s"), 4, "--time 0.001s"),
    (("--energy", "0.01J"), 4, "--energy 10 mJ"), (("--max-kv-size", "32"), 4, "the context"),
    (("--image-tokens", "12"), 12, "--image-tokens"),
])  # fmt: skip
def test_auto_names_the_limiting_budget(limit: tuple[str, ...], most: int, why: str) -> None:
    found = edge_json(*PLAN, "44x30", "--json", "--device", "raspberry-pi-5", "--prompt-tokens", "1", *limit)["image"]
    assert (found["auto"], why in found["auto_by"]) == (most, True), found


def test_plan_says_why_the_cpu_encodes() -> None:
    with on_gpu(SOME_GPU):
        found = edge_here(*PLAN, "44x30", "--backend", "llamacpp").stdout
        assert "the cpu engine encodes: the llamacpp engine has no encoders" in found
        found = edge(*PLAN, "44x30", "--backend", "gpu", "--memory", "1GiB").stdout
    assert "is a software adapter, which is slower" in found
