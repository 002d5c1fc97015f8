"""Drivers of GPUs: every host does the same with the same program. Software adapters stand in for them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import GOLDEN, GPU_HOST, first_adapter, on_gpu

from edge.backends.tvm.gpu import bandwidth, hosts
from edge.backends.tvm.gpu.hosts import Adapter, Device, Limits, choose_adapter, open_device
from edge.backends.tvm.gpu.hosts.binaries import keep_binary
from edge.backends.tvm.gpu.hosts.wgpu import WGPUDevice
from edge.backends.tvm.gpu.program import Dispatch, Kernel, Slice
from edge.devices.profiles import describe_host
from edge.devices.profiles.file import read_profile, write_profile
from edge.errors import EngineError, UnsupportedError
from edge.lab.profiling import ceilings
from edge.model.model import open_model
from edge.run.starting.loading import load
from edge.sampling import SamplingParams
from edge.storage.cache import entries

pytest.importorskip("tvm")

HOSTS = [GPU_HOST, "opencl"]
WIDTH = 64


@pytest.fixture(params=HOSTS)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return first_adapter(request.param)


@pytest.fixture
def device(adapter: Adapter) -> Iterator[Device]:
    with closing(open_device(adapter)) as opened:
        opened.prepare(kernels(adapter.language))
        yield opened


@cache
def kernels(language: str) -> dict[str, Kernel]:
    """edge_sums: out[i] = factor · (sum of 8 neighbours in x) + half of words + row of the workgroup. edge_next: counts
    and copies, so that its order shows."""
    from edge.backends.tvm.gpu.kernels import threads as t
    from edge.backends.tvm.gpu.lowering import lower

    def sums(s: Any) -> None:
        memory = s.shared(WIDTH)
        at = t.let((s.row * s.width + s.group) * WIDTH + s.thread)
        total = t.reduce(s, memory, s.x[at], 8, lambda a, b: a + b)
        number = t.half(t.lane(s.words[t.quotient(at, 4)], 1), 1)
        t.store(s.out, at, t.to_float(s.factor) * total + number + t.to_float(s.row))

    def following(s: Any) -> None:
        with t.when(s.thread < 4):
            t.store(s.counts, s.thread, s.counts[s.thread] * s.factor + s.thread)

    reads = {"x": "float32", "words": "uint32x4"}
    built = [
        t.build("edge_sums", WIDTH, reads, {"out": "float32"}, ["width", "factor"], sums),
        t.build("edge_next", WIDTH, {}, {"counts": "int32"}, ["factor"], following),
    ]
    return {each.name: lower(each, language) for each in built}


def sums(
    device: Device, groups: tuple[int, int] = (2, 3), per: int = 0, offset: int = 0
) -> tuple[Dispatch, dict[str, Any]]:
    """A dispatch of edge_sums whose `x` begins at offset, and its buffers: ones and twos."""
    count = groups[0] * groups[1] * WIDTH
    x = np.resize(np.array([1, 2], np.float32), count)
    words = np.zeros((count // 4, 4), np.uint32)
    words[:, 1] = np.array([0, 0.5], np.float16).view(np.uint32)
    buffers = {"a": device.create(offset + x.nbytes), "w": device.create(words.nbytes), "o": device.create(x.nbytes)}
    device.write(buffers["a"], offset, x)
    device.write(buffers["w"], 0, words)
    slices = Slice("o"), Slice("a", offset, x.nbytes), Slice("w")
    return Dispatch("edge_sums", slices, (groups[0], 3), groups, "attention", 0, per), buffers


def read_floats(device: Device, buffer: Any, count: int) -> np.ndarray:
    return device.read(buffer, 0, 4 * count).view(np.float32)


@pytest.mark.parametrize("offset", [0, 256, 1024])
def test_kernels_read_parts_of_buffers_and_scalars(device: Device, offset: int) -> None:
    dispatch, buffers = sums(device, offset=offset)
    device.run(device.record([dispatch], buffers))
    got = read_floats(device, buffers["o"], 2 * 3 * WIDTH).reshape(3, -1)
    assert np.array_equal(got, np.repeat([[36.5], [37.5], [38.5]], 2 * WIDTH, 1))


def test_tokens_decide_how_many_workgroups_run(device: Device) -> None:
    dispatch, buffers = sums(device, groups=(1, 4), per=8)
    recording = device.record([dispatch], buffers)
    for tokens, rows in ((9, 2), (32, 4), (1, 1), (8, 1)):
        device.write(buffers["o"], 0, np.zeros(4 * WIDTH, np.float32))
        device.run(recording, tokens)
        got = read_floats(device, buffers["o"], 4 * WIDTH).reshape(4, -1)[:, 0]
        assert got.astype(bool).tolist() == [row < rows for row in range(4)]


def test_dispatches_run_in_order_and_several_times(device: Device) -> None:
    counts = device.create(16)
    dispatches = [Dispatch("edge_next", (Slice("c"),), (factor,), (1, 1), "attention") for factor in (2, 3, -1)]
    recording = device.record(dispatches, {"c": counts})
    expected = np.ones(4, np.int64)
    for times in (1, 3):
        device.write(counts, 0, np.ones(4, np.int32))
        expected[:] = 1
        device.run(recording, times=times)
        for factor in (2, 3, -1) * times:
            expected = expected * factor + np.arange(4)
        assert device.read(counts, 0, 16).view(np.int32).tolist() == expected.tolist()


def test_writes_runs_and_reads_keep_their_order(device: Device) -> None:
    counts = device.create(16)
    recording = device.record([Dispatch("edge_next", (Slice("c"),), (3,), (1, 1), "attention")], {"c": counts})
    for first in range(5):
        device.write(counts, 0, np.full(4, first, np.int32))
        device.run(recording)
        device.write(counts, 4, np.full(1, 70, np.int32))
        device.run(recording)
        assert device.read(counts, 0, 16).view(np.int32).tolist() == [9 * first, 211, 9 * first + 8, 9 * first + 12]


def test_arrays_may_change_after_they_were_written(device: Device) -> None:
    """Small writes are queued, big ones waited for."""
    small, big = np.arange(4, dtype=np.int32), np.ones(1 << 20, np.int32)
    buffer = device.create(big.nbytes + 256)
    for step in range(300):
        small[:] = step
        device.write(buffer, 0, small)
    device.write(buffer, 256, big)
    small[:], big[:] = -1, -1
    assert device.read(buffer, 0, 16).view(np.int32).tolist() == [299] * 4
    assert np.all(device.read(buffer, 256, big.nbytes).view(np.int32) == 1)
    device.write(buffer, 256 + 8, np.array([[7, 8]], np.int32)[:, ::-1])  # not contiguous
    assert device.read(buffer, 256, 20).view(np.int32).tolist() == [1, 1, 8, 7, 1]


def test_memory_is_counted_and_begins_with_zeros(device: Device) -> None:
    assert device.allocated == 0
    one, two = device.create(1000), device.create(4096)
    assert 5096 <= device.allocated <= 5096 + 2 * 256
    assert not device.read(one, 0, 1000).any()
    assert not device.read(two, 0, 4096).any()
    device.free(one)
    assert 4096 <= device.allocated <= 4096 + 256
    device.close()
    device.close()
    assert device.allocated == 0


def test_every_dispatch_is_timed(device: Device) -> None:
    dispatch, buffers = sums(device)
    recording = device.record([dispatch, dispatch], buffers)
    seconds = device.time(recording)
    assert len(seconds) == 2
    assert all(0 < each < 5 for each in seconds)
    assert read_floats(device, buffers["o"], 1)[0] == 36.5


def test_driver_failures_raise_one_line(adapter: Adapter) -> None:
    with closing(open_device(adapter)) as device:
        good = kernels(device.adapter.language)
        source = good["edge_next"].source.rstrip().removesuffix("}") + "undeclared = 1; }"
        bad = replace(good["edge_next"], source=source)
        told = list[float]()
        with pytest.raises(EngineError, match="edge_next") as caught:
            device.prepare({"edge_sums": good["edge_sums"], "edge_next": bad}, told.append)
        assert told == [0.5]
        assert len(str(caught.value).splitlines()) == 1
        assert "undeclared" in str(caught.value)
        with pytest.raises(EngineError) as caught:
            device.create(1 << 50)
        assert len(str(caught.value).splitlines()) == 1
        assert "memory" in str(caught.value) or "bytes" in str(caught.value)
        assert device.allocated == 0


def test_probed_gpu_is_part_of_the_profile(adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_BUFFER", 1 << 22)
    monkeypatch.setattr(ceilings, "probe_profile", lambda *_: describe_host())
    monkeypatch.setenv("EDGE_GPU", adapter.place)
    profile, reason = ceilings.probe_device(0.1)
    assert reason is None
    assert profile.gpu == adapter.name
    assert profile.figures["gpu_read_bandwidth"].kind == "measured"
    write_profile(profile, tmp_path / "host.toml")
    assert read_profile(tmp_path / "host.toml") == profile
    monkeypatch.setenv("EDGE_GPU", "no such card")
    profile, reason = ceilings.probe_device(0.1)
    assert reason is not None
    assert "no GPU is called 'no such card'" in reason
    assert profile.gpu is None
    assert "gpu_read_bandwidth" not in profile.figures


@pytest.fixture
def wgpu() -> Iterator[WGPUDevice]:
    with closing(cast(WGPUDevice, open_device(first_adapter("wgpu")))) as opened:
        opened.prepare(kernels("wgsl"))
        yield opened


def test_wgpu_raises_where_its_library_would_abort_the_process(wgpu: WGPUDevice) -> None:
    counts, freed = wgpu.create(32), wgpu.create(16)

    def recorded(*slices: Slice, kernel: str = "edge_next", groups: int = 1) -> Any:
        scalars = (2,) if kernel == "edge_next" else (1, 2)
        dispatch = Dispatch(kernel, slices, scalars, (groups, 1), "attention")
        return wgpu.record([dispatch], {"c": counts, "f": freed})

    used = recorded(Slice("f"))
    wgpu.free(freed)
    wgpu.free(freed)
    wrong: dict[str, Callable[[], Any]] = {
        "buffer was freed": lambda: wgpu.run(used),
        "was freed": lambda: wgpu.time(used),
        "freed": lambda: recorded(Slice("f")),
        "the buffer was freed": lambda: wgpu.read(freed, 0, 16),
        "wgpu: the buffer was freed": lambda: wgpu.write(freed, 0, np.zeros(4, np.int32)),
        "bytes 32 to 32": lambda: recorded(Slice("c", 32)),
        "bytes 0 to 64": lambda: recorded(Slice("c", 0, 64)),
        "min_storage_buffer_offset_alignment": lambda: recorded(Slice("c", 4)),
        "conflicting usages": lambda: wgpu.run(recorded(Slice("c"), Slice("c"), Slice("c"), kernel="edge_sums")),
        "less or equal to": lambda: wgpu.run(recorded(Slice("c"), groups=1 << 20)),
        "overrunning the bounds": lambda: wgpu.write(counts, 16, np.zeros(8, np.int32)),
        "overrunning": lambda: wgpu.read(counts, 16, 32),
        "not aligned": lambda: wgpu.write(counts, 2, np.zeros(1, np.int32)),
        "entry point": lambda: wgpu.prepare({"edge_other": replace(kernels("wgsl")["edge_next"], name="edge_other")}),
    }
    for words, call in wrong.items():
        with pytest.raises(EngineError, match=words) as caught:
            call()
        assert len(str(caught.value).splitlines()) == 1
    wgpu.run(recorded(Slice("c")))  # and goes on
    assert wgpu.read(counts, 0, 16).view(np.int32).tolist() == [0, 1, 2, 3]
    wgpu.close()
    for call in (lambda: wgpu.create(16), lambda: recorded(Slice("c")), lambda: wgpu.read(counts, 0, 16)):
        with pytest.raises(EngineError, match=r"freed|closed"):
            call()


def test_lost_wgpu_device_is_an_error(wgpu: WGPUDevice) -> None:
    counts = wgpu.create(16)
    dispatch = Dispatch("edge_next", (Slice("c"),), (2,), (1, 1), "attention")
    recording = wgpu.record([dispatch], {"c": counts})
    wgpu._lib.wgpuDeviceDestroy(wgpu._device)
    calls: list[Callable[[], Any]] = [
        lambda: wgpu.run(recording), lambda: wgpu.time(recording), lambda: wgpu.create(16),
        lambda: wgpu.write(counts, 0, np.zeros(4, np.int32)), lambda: wgpu.read(counts, 0, 16),
        lambda: wgpu.record([dispatch], {"c": counts}),
        lambda: wgpu.prepare({"edge_other": replace(kernels("wgsl")["edge_next"], source="")}),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(EngineError, match="device is lost"):
            call()


@pytest.mark.exhaustive
def test_answer_that_lost_gpu_ends_is_reported() -> None:
    """The driver is told to destroy the device. What was said is not lost, and the session fails from then on."""
    pytest.importorskip("wgpu")
    with on_gpu("wgpu:0"):
        session = load(open_model(GOLDEN / "llama-gqa-tied.gguf"), backend="gpu", max_kv_size=64, kv_dtype="f16")
    prompt, said = np.arange(3, 9, dtype=np.int32), list[str]()

    def answer() -> None:
        greedy = SamplingParams(temperature=0)
        for piece in session.stream(prompt, max_tokens=40, ignore_eos=True, sampling=greedy, keep_text=True):
            said.append(piece)
            if len(said) == 5:
                device: Any = session.engine.passes.device  # type: ignore[attr-defined]
                device._lib.wgpuDeviceDestroy(device._device)

    with pytest.raises(EngineError, match="device is lost"):
        answer()
    assert (session.report.stop_reason, session.report.text) == ("failed", "".join(said))
    assert session.report.tokens.generated >= 5
    with pytest.raises(EngineError, match="device is lost"):
        session.generate(prompt, max_tokens=2)
    session.close()


@pytest.mark.parametrize("within", ["_wait", "mapped"])
def test_wgpu_may_be_interrupted_while_it_waits(
    wgpu: WGPUDevice, capfd: pytest.CaptureFixture[str], within: str
) -> None:
    """mapped: a callback of the library, where cffi would print the exception and go on."""
    counts = wgpu.create(16)
    wgpu.write(counts, 0, np.arange(4, dtype=np.int32))

    def interrupt(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == within:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            wgpu.read(counts, 0, 16)
    finally:
        sys.setprofile(None)
    assert wgpu.read(counts, 0, 16).view(np.int32).tolist() == [0, 1, 2, 3]
    assert capfd.readouterr().err == ""


def test_opencls_binaries_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = first_adapter("opencl")
    opencl = pytest.importorskip("edge.backends.tvm.gpu.hosts.opencl")
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path))
    made = kernels("opencl")
    wrote: list[object] = []
    monkeypatch.setattr(opencl, "keep_binary", lambda *of: [wrote.append(of), keep_binary(*of)])
    for damaged, writes in ((False, 2), (False, 0), (True, 2)):
        for entry in entries("kernels") if damaged else []:
            entry.path.write_bytes(bytes(entry.bytes))
        wrote.clear()
        device = open_device(adapter)
        device.prepare(made)
        dispatch, buffers = sums(device)
        device.run(device.record([dispatch], buffers))
        assert read_floats(device, buffers["o"], 1)[0] == 36.5
        device.close()
        assert len(entries("kernels")) == len(made)
        assert len(wrote) == writes


NAMES = [
    ("cuda", "NVIDIA GeForce RTX 3080", "discrete"), ("wgpu", "Intel UHD", "integrated"), ("opencl", "pthread", "cpu"),
]  # fmt: skip


def pretend(monkeypatch: pytest.MonkeyPatch, names: list[tuple[str, str, str]]) -> None:
    """These are the adapters of all hosts."""
    limits = Limits(1 << 27, 1 << 28, 8, 256, 16384, 65535)

    class Listed:
        def __init__(self, host: str) -> None:
            self.host, self.mine = host, [each for each in names if each[0] == host]

        def adapters(self) -> list[Adapter]:
            return [
                Adapter(host, "wgsl", index, name, "", "", kind, False, None, limits, frozenset())
                for index, (host, name, kind) in enumerate(self.mine)
            ]

        def missing(self) -> str | None:
            return None if self.mine else f"no driver for {self.host}"

    monkeypatch.setattr(hosts, "host_named", Listed)


@pytest.mark.parametrize(
    ("wanted", "place"),
    [
        (None, "cuda:0"), ("", "cuda:0"), ("intel", "wgpu:0"), ("UHD", "wgpu:0"), ("wgpu:1", "wgpu:1"),
        ("Pthread", "opencl:0"),
    ],
)  # fmt: skip
def test_adapter_is_chosen_by_name_or_place(monkeypatch: pytest.MonkeyPatch, wanted: str | None, place: str) -> None:
    pretend(monkeypatch, [*reversed(NAMES), ("wgpu", "NVIDIA GeForce RTX 3080", "discrete")])
    monkeypatch.delenv("EDGE_GPU", raising=False)
    assert choose_adapter(wanted).place == place
    monkeypatch.setenv("EDGE_GPU", wanted or "")
    assert choose_adapter().place == place


def test_auto_never_chooses_software_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGE_GPU", raising=False)
    pretend(monkeypatch, NAMES[2:])
    with pytest.raises(UnsupportedError, match=r"opencl:0 \(pthread\); EDGE_GPU=opencl:0 takes one"):
        choose_adapter()
    assert choose_adapter("opencl:0").name == "pthread"
    for wanted in ("opencl:1", "radeon"):
        with pytest.raises(UnsupportedError, match=rf"no GPU is called '{wanted}' \(EDGE_GPU\): there are opencl:0"):
            choose_adapter(wanted)
    pretend(monkeypatch, [])
    with pytest.raises(UnsupportedError, match="found: no driver for cuda; no driver for wgpu; no driver for opencl"):
        choose_adapter()
    monkeypatch.setenv("EDGE_GPU", "off")
    with pytest.raises(UnsupportedError, match="unset EDGE_GPU"):
        choose_adapter()
