"""What fits a budget: counted before anything is loaded, and compared with what a process then really takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from conftest import examples, load_engine, run_child
from fork_server import two_cores
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.backends import engine_named, find_backend
from edge.backends.base import Backend, Engine, EngineConfig
from edge.budget import parse_bytes
from edge.devices.memory import MemoryLimit, MemoryUse
from edge.errors import BudgetError, EdgeError, InputError, UnsupportedError
from edge.kv import make_policy
from edge.model.model import Model, open_model
from edge.options import Options
from edge.plan.plan import Plan, make_plan
from edge.plan.resolve import resolve
from edge.prompt_cache.cache import PromptCache

MIB = 1 << 20
RESIDENT, PEAK = 60 * MIB, 70 * MIB  # of the process that plans, as most tests have it
DRIFT = 2 * MIB  # by which the next one may be larger
CONTEXT = 8192


@pytest.fixture(scope="module", autouse=True)
def planning_process() -> object:
    """What this process takes must not decide what a test sees: pytest grows from test to test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.plan.plan.memory_use", lambda: MemoryUse(RESIDENT, PEAK, None, None))
        patch.setattr("edge.plan.plan.memory_limit", lambda root: MemoryLimit(4096 * MIB, "free memory"))
        yield


SMOLLM2 = open_model("smollm2-135m")
LLAMACPP: Backend = find_backend("llamacpp", SMOLLM2.file, SMOLLM2.spec)


def plan(request: Options | None = None, memory: int | None = None) -> Plan:
    return make_plan(SMOLLM2.spec, LLAMACPP, replace(request or Options(), memory=memory))


def plan_if_it_fits(request: Options, memory: int) -> Plan | None:
    try:
        return plan(request, memory)
    except BudgetError:
        return None


REQUESTS = st.builds(
    Options,
    kv_policy=st.sampled_from(["streaming", "window", "full"]),
    kv_dtype=st.sampled_from([None, "f32", "f16", "q8_0", "q4_0"]),
    max_kv_size=st.none() | st.integers(16, CONTEXT),
    expected_tokens=st.none() | st.integers(1, 2 * CONTEXT),
    logits_rows=st.integers(1, 16),
    threads=st.just(1),
)
BUDGETS = st.integers(150, 1200).map(lambda mib: mib * MIB)


# The table of bytes


def test_plan_becomes_json() -> None:
    chosen = plan(memory=256 * MIB)
    read = json.loads(json.dumps(chosen.to_dict()))
    assert read["predicted_peak"] == chosen.predicted_peak
    assert read["config"]["capacity"] == chosen.config.capacity
    assert set(read["bytes"]) == {
        "interpreter", "weights", "kv", "scratch", "reserve", "streamed", "lora", "fixed_kv", "gpu", "on_card",
        "on_disk", "snapshots", "draft", "prompts",
    }  # fmt: skip


def test_earlier_peak_counts_in_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """VmHWM never falls: a process that once took 900 MiB cannot promise less."""
    monkeypatch.setattr("edge.plan.plan.memory_use", lambda: MemoryUse(RESIDENT, 900 * MIB, None, None))
    assert plan(Options(max_kv_size=256), memory=1000 * MIB).predicted_peak == 900 * MIB
    with pytest.raises(BudgetError):
        plan(Options(max_kv_size=256), memory=800 * MIB)


@pytest.mark.parametrize(("kv_dtype", "capacity"), [("f16", 16), ("q8_0", 256), ("q4_0", 300)])
def test_kv_bytes_equal_the_engines_allocation(
    smollm2: Model, engines: Callable[[Engine], Engine], kv_dtype: str, capacity: int
) -> None:
    engine = engines(load_engine(smollm2, "llamacpp", kv_dtype, capacity=capacity, chunk=16))
    assert LLAMACPP.footprint(smollm2.spec, engine.config).kv == engine.kv.nbytes
    # llama.cpp's own word: a saved row holds what a row of its cache holds, and a few bytes about it.
    engine.forward(np.full(16, 1000, np.int32))
    allocated = -(-capacity // 256) * 256
    assert len(engine.kv.save().data) / 16 * allocated == pytest.approx(engine.kv.nbytes, rel=0.02)


# Choices


@settings(max_examples=examples(25))
@given(REQUESTS, BUDGETS)
def test_plan_fits_its_budget(request: Options, memory: int) -> None:
    chosen = plan_if_it_fits(request, memory)
    if chosen is None:
        return
    config = chosen.config
    assert chosen.bytes.total + chosen.bytes.reserve <= memory == chosen.limit
    assert chosen.predicted_peak == max(chosen.bytes.total, PEAK)
    assert 1 <= config.capacity <= CONTEXT
    assert request.max_kv_size is None or config.capacity == request.max_kv_size
    assert 1 <= config.chunk <= config.capacity
    assert 1 <= config.logits_rows <= config.chunk
    assert 1 <= chosen.evict_step <= config.capacity
    if request.kv_policy != "full" and (request.expected_tokens or CONTEXT) > config.capacity:
        assert config.chunk <= max(1, config.capacity // 8)  # a chunk that evicts leaves most of the cache in place


@settings(max_examples=examples(20))
@given(REQUESTS, BUDGETS, BUDGETS)
def test_more_memory_never_gives_fewer_rows(request: Options, one: int, other: int) -> None:
    less, more = (plan_if_it_fits(request, memory) for memory in sorted((one, other)))
    if less is not None:
        assert less.config.capacity <= more.config.capacity


def test_few_rows_go_before_chunks_are_short() -> None:
    """But not rows that the run is known to need."""
    budgets = range(230 * MIB, 270 * MIB, MIB)
    pressed = [made for memory in budgets if (made := native_plan(Options(), memory)).config.capacity < CONTEXT]
    assert pressed
    assert min(each.config.chunk for each in pressed) >= 64
    known = [native_plan(Options(expected_tokens=4096), memory).config for memory in budgets]
    assert any(each.capacity == 4096 and each.chunk < 64 for each in known)


@pytest.mark.parametrize(
    ("expected", "rows"), [(1, 256), (256, 256), (257, 512), (3000, 3072), (CONTEXT, CONTEXT), (10 * CONTEXT, CONTEXT)]
)
def test_cache_is_as_long_as_run(expected: int, rows: int) -> None:
    assert plan(Options(expected_tokens=expected)).config.capacity == rows


def test_weights_are_repacked_only_beside_enough_rows() -> None:
    spec = replace(SMOLLM2.spec, weight_type="Q4_0")
    ample = make_plan(spec, LLAMACPP, Options(memory=1024 * MIB))
    assert ample.config.repack
    assert ample.bytes.weights == spec.weight_bytes + spec.largest_tensor  # the tied head is there twice
    tight = make_plan(spec, LLAMACPP, Options(memory=200 * MIB))
    assert not tight.config.repack


def test_without_budget_system_sets_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.plan.plan.memory_limit", lambda root: MemoryLimit(256 * MIB, "cgroup"))
    chosen = plan()
    assert plan(memory=300 * MIB).limit_source == "budget"
    assert (chosen.limit, chosen.limit_source) == (256 * MIB, "cgroup")
    assert chosen.predicted_peak <= 256 * MIB
    assert chosen.config.capacity < CONTEXT
    monkeypatch.setattr("edge.plan.plan.memory_limit", lambda root: MemoryLimit(50 * MIB, "cgroup"))
    with pytest.raises(BudgetError, match="the cgroup limit is 50 MiB"):
        plan()


# What does not fit


NAMED = re.compile(
    r"fits is --memory (\d+)MiB \((\d+) KV rows(, weights streamed)?\)"
    r"(?:, or --memory (\d+)MiB with --max-kv-size (\d+)( --kv-policy streaming)?( instead of --kv-memory)?)?$"
)
SMALL_REQUESTS = st.builds(
    Options,
    kv_policy=st.sampled_from(["streaming", "window", "full", "auto", "h2o", "keydiff", "snapkv:sinks=20"]),
    kv_dtype=st.sampled_from([None, "f16", "q8_0", "int8", "int4"]),
    max_kv_size=st.none() | st.integers(16, CONTEXT),
    kv_memory=st.none() | st.sampled_from([MIB, 20 * MIB]),
    expected_tokens=st.none() | st.integers(1, 2 * CONTEXT),
    prefill_step_size=st.none() | st.integers(1, 512),
    sinks=st.integers(0, 100),
    prompt_cache=st.none() | st.just(PromptCache(memory="8MiB")),
    threads=st.just(1),
)


@settings(max_examples=examples(20))
@given(SMALL_REQUESTS, st.sampled_from(["cpu", "llamacpp"]), st.integers(20, 89))
def test_budget_that_is_named_is_smallest_that_fits(request_: Options, engine: str, memory: int) -> None:
    """Doing what the message says, and nothing else, gives a plan, also in a process that is larger by the drift; a MiB
    less gives none there."""
    backend = NATIVE if engine == "cpu" else LLAMACPP
    try:
        native_plan(request_, memory * MIB, backend)
        return
    except BudgetError as error:
        found, smallest = NAMED.search(str(error)), error.smallest
    except EdgeError:  # the request is none: --max-kv-size beside --kv-memory, say
        return
    assert smallest == int(found[1]) * MIB
    fewer = replace(request_, max_kv_size=int(found[5] or 0) or None, kv_memory=None)
    fewer = replace(fewer, kv_policy="streaming" if found[6] else request_.kv_policy)
    for each, named in ((request_, found[1]), (fewer, found[4])):
        if named is not None:
            assert native_plan(each, int(named) * MIB, backend).bytes.total < int(named) * MIB
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("edge.plan.plan.memory_use", lambda: MemoryUse(RESIDENT + DRIFT, PEAK, None, None))
                made = native_plan(each, int(named) * MIB, backend)
                with pytest.raises(BudgetError):
                    native_plan(each, (int(named) - 1) * MIB, backend)
            if each is request_:
                assert (made.config.capacity, bool(made.config.resident)) == (int(found[2]), bool(found[3]))


@pytest.mark.parametrize(("options", "compiled"), [
    (Options(expected_tokens=200), lambda config: not config.drafts),
    (Options(expected_tokens=CONTEXT, kv_policy="auto"),
     lambda config: config.kv_dtype == "int8" and not config.drafts),
])  # fmt: skip
def test_larger_budget_never_needs_compilation_without_room(
    options: Options, compiled: Callable[[EngineConfig], bool]
) -> None:
    def first_run(config: EngineConfig) -> int:
        return 0 if compiled(config) else 600 * MIB

    def planned(memory: int) -> Plan:
        return make_plan(SMOLLM2.spec, NATIVE, replace(options, memory=memory), first_run=first_run)

    with pytest.raises(BudgetError) as refused:
        planned(64 * MIB)
    smallest = refused.value.smallest
    assert smallest < 200 * MIB
    assert all(compiled(planned(memory).config) for memory in range(smallest, 600 * MIB, 100 * MIB))
    assert planned(1024 * MIB).config.drafts


# What is refused


def test_impossible_requests_are_refused() -> None:
    for values, message in (
        *(({"max_kv_size": each}, "--max-kv-size must be from 16") for each in (15, 0, -1)),
        ({"max_kv_size": CONTEXT + 1}, "--max-kv-size must be from 16 to 8192"),
        ({"max_kv_size": 100, "sinks": 50}, "--sinks 50 needs at least 108 KV rows"),
        ({"sinks": 9999}, "--sinks 9999 is too many for the 8192 positions of the model"),
        ({"sinks": 9999, "max_kv_size": 512}, "--sinks 9999 is too many"),
        ({"kv_policy": "snapkv:sinks=4093"}, "--sinks 4093 is too many"),
        ({"kv_policy": "window", "sinks": -1}, "--sinks must be 0 or more"),
        *(({"threads": each}, "--threads must be from 1") for each in (0, -2, 100_000)),
        ({"threads": two_cores() + 1}, f"from 1 to {two_cores()}, the logical cores"),
        *(({"prefill_step_size": each}, "--prefill-step-size must be from 1") for each in (0, CONTEXT + 1)),
        ({"prefill_step_size": 300, "max_kv_size": 512}, "too long for 512 KV rows: at most 256"),
        ({"kv_policy": "h3o"}, "unknown KV policy 'h3o'"), ({"kv_policy": "auto:sinks=4"}, "auto has no options"),
        ({"kv_dtype": "q5_1"}, "no KV dtype 'q5_1': choose f16"),
        ({"expected_tokens": -5}, "expected"), ({"logits_rows": 0}, "logits"), ({"logits_rows": -1}, "logits"),
    ):  # fmt: skip
        error: type[EdgeError] = UnsupportedError if "kv_dtype" in values else InputError
        with pytest.raises(error, match=re.escape(message)):
            plan(Options(**values))


@pytest.mark.parametrize("sinks", [4, 200, 300])
def test_cache_has_room_for_its_sinks_and_window(sinks: int) -> None:
    """--max-kv-size may not go below `2 · sinks + 8`; a plan that chooses the rows must not either."""
    plans = [plan_if_it_fits(Options(sinks=sinks), mib * MIB) for mib in range(150, 250, 4)]
    rows = [chosen.config.capacity for chosen in plans if chosen is not None]
    assert rows
    assert min(rows) >= 2 * sinks + 8


# Policies that look at heads, and sizes in bytes

NATIVE = engine_named("cpu")


def native_plan(request: Options, memory: int | None = None, backend: Backend = NATIVE) -> Plan:
    return make_plan(SMOLLM2.spec, backend, replace(request, memory=memory))


@pytest.mark.parametrize(("backend", "request_", "memory", "policy", "kv_dtype"), [
    (NATIVE, Options(expected_tokens=1000), None, "streaming", "f16"),
    (NATIVE, Options(expected_tokens=CONTEXT), None, "streaming", "f16"),
    (NATIVE, Options(expected_tokens=CONTEXT), 256 * MIB, "h2o", "int8"),
    (NATIVE, Options(expected_tokens=CONTEXT + 1), None, "h2o", "int8"), (NATIVE, Options(), None, "h2o", "int8"),
    (NATIVE, Options(expected_tokens=20_000, kv_dtype="f32"), None, "h2o", "f32"),
    (NATIVE, Options(expected_tokens=1000, kv_dtype="int8"), None, "streaming", "int8"),
    (NATIVE, Options(expected_tokens=400, max_kv_size=512), None, "streaming", "f16"),
    (NATIVE, Options(expected_tokens=1000, max_kv_size=512), None, "h2o", "int8"),
    (NATIVE, Options.parse(expected_tokens=200, kv_memory="6MiB"), None, "streaming", "f16"),
    (NATIVE, Options.parse(expected_tokens=1000, kv_memory="6MiB"), None, "h2o", "int8"),
    (LLAMACPP, Options(expected_tokens=20_000), None, "streaming", "f16"),
    (LLAMACPP, Options(expected_tokens=20_000, kv_dtype="q8_0"), None, "streaming", "q8_0"),
    (LLAMACPP, Options(), None, "streaming", "f16"),
])  # fmt: skip
def test_auto_keeps_all_rows_or_loses_least(
    backend: Backend, request_: Options, memory: int | None, policy: str, kv_dtype: str
) -> None:
    chosen = native_plan(replace(request_, kv_policy="auto"), memory, backend)
    assert (chosen.kv_policy, chosen.config.kv_dtype) == (policy, kv_dtype)
    assert chosen.config.observes == chosen.config.per_head == (policy == "h2o")
    assert bool(chosen.dtype_by) == (policy == "h2o" and request_.kv_dtype is None)
    stated = native_plan(replace(request_, kv_policy=policy, kv_dtype=kv_dtype), memory, backend)
    assert replace(chosen, dtype_by="") == stated


@settings(max_examples=examples(15))
@given(st.integers(0, 64), st.none() | st.integers(0, 64))
def test_options_resolve_once_and_stay_as_stated(sinks: int, keep: int | None) -> None:
    options = Options.parse(kv_policy="h2o:recent=0.25", sinks=sinks, keep=keep, kv_memory="12MiB")
    (run,) = resolve(SMOLLM2.spec, NATIVE, options, elsewhere=False)
    policy: Any = run.policy
    assert (policy.name, policy.recent, policy.sinks) == ("h2o", 0.25, max(sinks, keep or 0))
    assert run.policy is policy
    assert run.config(run.rows).kv_dtype == run.kv_dtype == "f16"
    assert run.options is options
    assert (options.max_kv_size, options.kv_dtype) == (None, None)
    chosen = native_plan(options)
    assert (chosen.config.capacity, chosen.policy) == (run.rows, policy)


def test_policies_that_engine_cannot_show() -> None:
    reference = find_backend("reference", SMOLLM2.file, SMOLLM2.spec)
    for backend, policy in product((LLAMACPP, reference), ("h2o", "snapkv:window=8", "keydiff")):
        if make_policy(policy).needs.queries and backend.CAPABILITIES.attention:
            assert native_plan(Options(kv_policy=policy), backend=backend).config.observes
            continue
        with pytest.raises(UnsupportedError, match=r"needs an engine that shows (attention|keys), and") as caught:
            native_plan(Options(kv_policy=policy), backend=backend)
        assert "\n" not in str(caught.value)
    with pytest.raises(UnsupportedError, match="use --kv-dtype f16"):
        native_plan(Options(kv_policy="h2o", kv_dtype="q4_0"), backend=LLAMACPP)


def test_sinks_among_policys_options_count_as_sinks() -> None:
    with pytest.raises(InputError, match="--sinks 50 needs at least 108 KV rows"):
        native_plan(Options(kv_policy="h2o:sinks=50", max_kv_size=100))
    assert native_plan(Options(kv_policy="h2o:sinks=50", max_kv_size=108)).sinks == 50
    assert native_plan(Options(kv_policy="h2o:sinks=0", max_kv_size=8)).sinks == 0


def test_pinned_rows_have_room_and_are_counted() -> None:
    for policy in ("streaming", "window"):
        with pytest.raises(InputError, match="--keep 100 needs at least 208 KV rows: raise --max-kv-size 200 or lower"):
            native_plan(Options(kv_policy=policy, keep=100, max_kv_size=200))
    plain, pinned = (native_plan(Options(keep=keep, max_kv_size=512)) for keep in (0, 100))
    assert (plain.sinks, pinned.sinks) == (4, 100)
    heads = 30 * 3 * 64 * 4  # bytes of one row's keys, which are remembered in float32
    assert pinned.bytes.scratch - plain.bytes.scratch == 96 * heads
    assert native_plan(Options(kv_policy="h2o:sinks=2", keep=100, max_kv_size=512)).sinks == 100
    assert native_plan(Options(kv_policy="full", keep=100, max_kv_size=100)).sinks == 0  # it evicts nothing


@settings(max_examples=examples(20))
@given(st.sampled_from([NATIVE, LLAMACPP]), st.integers(1, 300 * MIB))
def test_kv_memory_is_filled_and_not_exceeded(backend: Backend, size: int) -> None:
    request = Options.parse(kv_memory=f"{size}B")
    try:
        chosen = native_plan(request, backend=backend)
    except InputError as error:
        needed = int(re.findall(r"(\d+)KiB are needed", str(error))[0]) << 10
        assert size < needed
        assert native_plan(Options.parse(kv_memory=needed), backend=backend).bytes.kv <= needed
        return
    assert chosen.bytes.kv <= size
    more = chosen.config.capacity + 16
    assert more > CONTEXT or native_plan(Options(max_kv_size=more), backend=backend).bytes.kv > size


@pytest.mark.parametrize(("values", "message"), [
    ({"kv_memory": "5MiB", "max_kv_size": 64}, "--max-kv-size and --kv-memory both say"),
    ({"kv_memory": "lots"}, "--kv-memory 'lots' is not understood"),
    ({"kv_memory": 0}, "--kv-memory '0' must be greater than zero"),
    ({"kv_memory": "1KiB"}, "--kv-memory 1.0 KiB is too small: "),
    ({"kv_memory": "1KiB", "kv_policy": "auto"}, "--kv-memory 1.0 KiB is too small: "),
    ({"kv_memory": "1MiB", "sinks": 100}, "is too small: "),
])  # fmt: skip
def test_impossible_sizes_in_bytes_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        native_plan(Options.parse(**values))
    assert "\n" not in str(caught.value)


# What a process really takes

_MEASURE = """
import json, sys
import numpy as np
import edge

backend, memory, rows, kv_dtype, policy = sys.argv[1:]
model = edge.open_model("smollm2-135m")
options = {"max_kv_size": int(rows)} if rows != "None" else {}
options |= {"backend": backend, "kv_dtype": kv_dtype, "kv_policy": policy}
with edge.load(model, memory=memory, threads=1, **options) as session:
    config = session.plan.config
    count = min(config.chunk + 1, config.capacity)  # one whole chunk
    if config.per_head:  # and evictions
        count = config.capacity + 3 * config.chunk
    prompt = np.arange(1000, 1000 + count, dtype=np.int32)
    session.generate(prompt, max_tokens=8, ignore_eos=True)
    print(json.dumps({
        "predicted": session.plan.predicted_peak,
        "planned_kv": session.plan.bytes.kv,
        "kv": session.engine.kv.nbytes,
        "reported": session.report.memory.peak_rss,
    }))
"""


@pytest.mark.parametrize(
    ("backend", "memory", "rows", "kv_dtype", "policy"),
    [
        ("llamacpp", "220MiB", None, "f16", "streaming"),
        ("cpu", "180MiB", 256, "f16", "streaming"),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                ("cpu", "256MiB", 1024, "int8", "h2o"), ("cpu", "200MiB", None, "f16", "streaming"),
                ("cpu", "1GiB", None, "f16", "streaming"), ("llamacpp", "220MiB", None, "q4_0", "streaming"),
                ("llamacpp", "256MiB", 512, "f16", "h2o"), ("llamacpp", "1GiB", 2048, "f16", "streaming"),
            )
        ),
    ],
)  # fmt: skip
def test_prediction_is_within_tenth_of_measured_peak(
    backend: str, memory: str, rows: int | None, kv_dtype: str, policy: str
) -> None:
    if backend == "cpu":  # compile first: the kernel counts a child's children in, and the compiler is one
        run_child(_MEASURE, backend, "2GiB", rows, kv_dtype, policy)
    child = run_child(_MEASURE, backend, memory, rows, kv_dtype, policy)
    assert child.status == 0, child.errors
    assert child.output["kv"] == child.output["planned_kv"]
    assert child.output["reported"] == pytest.approx(child.peak, abs=MIB)
    assert child.output["predicted"] == pytest.approx(child.peak, rel=0.1)
    assert child.peak <= parse_bytes(memory)
