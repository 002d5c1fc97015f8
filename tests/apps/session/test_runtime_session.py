"""The C runtime beside the Python session: the same tokens, text and reasons for the end of answers."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import platform
import shutil
import struct
import sys
import threading
from collections.abc import Iterator
from ctypes import c_size_t
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pytest
from bundles import build_with, bundle_of, pair_of, refused
from conftest import exhaustive, run_child
from ctypes_bundle import Piece, open_bundle
from runtime_library import CHECKED, build, said_by
from test_prefix_runs import KINDS as PREFIX_KINDS
from test_prefix_runs import write_prefix

from edge.apps.enums import Finish, Role, Trim
from edge.errors import BusyError, EdgeError, InputError, ModelFormatError, UnsupportedError

MODEL = "llama-gqa-tied"
ROWS = {"max_kv_size": 128, "prefill_step_size": 16, "threads": 2}
FEW = ROWS | {"max_kv_size": 64}
STREAMING = {"kv_policy": "streaming", **ROWS}
WARM = {"temperature": 3.0, "top_k": 50, "top_p": 0.95, "min_p": 0.001, "repeat_penalty": 1.3, "frequency_penalty": 0.5}
SYSTEM = "Be brief."
GREEDY = {"max_tokens": 5, "temperature": 0, "ignore_eos": 1}
TEXT = "The quick brown fox jumps over the lazy dog. "


def ids(count: int, seed: int = 1) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, 200, count).tolist()
    return found


@pytest.mark.parametrize(("kind", "kv_dtype"), [("PROMPT_TUNING", "f16"), ("PREFIX_TUNING", "int8")])
def test_conversations_behind_a_prefix(kind: str, kv_dtype: str, tmp_path: Path) -> None:
    """Its rows begin the cache, stay when others are evicted, and are there again in a new conversation."""
    plain, count = STREAMING | {"kv_dtype": kv_dtype}, 16  # a chunk, so that both evict at the same times
    table = np.random.default_rng(1).standard_normal((count, PREFIX_KINDS[kind])).astype(np.float32)
    tensors = {"prompt_embeddings": ("F32", table)}
    prefix = write_prefix(tmp_path / "pirate", kind, tensors=tensors, num_virtual_tokens=count)
    with pair_of(MODEL, prefix=prefix, **plain) as pair:
        begun = pair.exported.use()["rows"]
        assert begun == count
        first, _, _ = pair.ask("Hi", **GREEDY)
        pair.ask("And?", **GREEDY)
        saved = pair.exported.save()
        pair.forget()
        assert pair.exported.use()["rows"] == begun
        pair.ask("Hi", system=SYSTEM, **GREEDY)
        pair.exported.rewind(1)  # the system's text stays
        pair.begun = False
        pair.ask("Ho", system=SYSTEM, told=True, **GREEDY)
        pair.forget()
        pair.ask(ids(400), **GREEDY)
        assert pair.exported.use()["evicted"] > 0
        pair.forget()
        assert pair.ask("Hi", **GREEDY)[0] == first
        pair.exported.load(saved)
        assert pair.exported.use()["rows"] > begun
        pair.exported.rewind()
        pair.exported.append(Role.SYSTEM, SYSTEM)
        for state in without_prefix(pair.exported.save()):
            refused(ModelFormatError, "damaged", pair.exported.load, state)
        assert pair.exported.use()["rows"] == begun
    if kind == "PROMPT_TUNING":
        with pytest.raises(UnsupportedError, match="adapters would change them: leave --lora-rank out"):
            bundle_of(MODEL, prefix=prefix, lora_rank=8, **plain)
    with open_bundle(bundle_of(MODEL, **plain)) as bundle, bundle.session(**GREEDY) as session:
        assert session.answer("Hi")[0] != first
        refused(ModelFormatError, "another bundle", session.load, saved)


def without_prefix(state: bytes) -> Iterator[bytes]:
    """The state of a system's text that waits, without rows, and with fewer rows of the text than a prefix has; their
    hashes are right."""
    (system,) = struct.unpack_from("<I", state, 108)
    no_rows = bytearray(state[:240] + state[-32 - 4 * system : -32])  # two headers, and the text's tokens
    struct.pack_into("<Q", no_rows, 80, len(no_rows) + 32)
    few_rows = bytearray(state[:-32])
    for made, places in ((no_rows, (160, 164, 168, 184, 208, 216)), (few_rows, (160,))):
        for at in places:  # system_rows, rows; of the cache: rows, known keys, base, next
            struct.pack_into("<Q" if at > 200 else "<I", made, at, int(made is few_rows))
        yield bytes(made) + hashlib.sha256(made).digest()


@pytest.mark.parametrize("policy", [
    "streaming", "h2o", "full", "kvzap",
    *map(exhaustive, ("window", "kvzap:floor=1", "streaming:sinks=2", "h2o:recent=0.3")),
])  # fmt: skip
def test_answers_are_those_of_the_python_session(policy: str) -> None:
    with pair_of(MODEL, **(ROWS | {"kv_policy": policy})) as pair:
        evicts = policy != "full"
        tokens, _, _ = pair.ask("Hi", max_tokens=6, seed=3, ignore_eos=1, **WARM)
        assert len(set(tokens)) > 3
        pair.ask("And?", max_tokens=6, seed=4, temperature=4.0, ignore_eos=1)
        drawn, _, _ = pair.ask(
            "Go on", max_tokens=24, seed=6, temperature=2.0, ignore_eos=1, dry_multiplier=3.0, dry_allowed_length=1,
            xtc_probability=0.6, xtc_threshold=0.01, logit_bias={tokens[0]: -100.0, tokens[1]: 2.5},
        )  # fmt: skip
        assert tokens[0] not in drawn
        pair.exported.bias({})
        pair.forget()
        _, text, _ = pair.ask("Hi", max_tokens=40, temperature=0, ignore_eos=1)
        pair.forget()
        assert pair.ask("Hi", max_tokens=40, temperature=0, ignore_eos=1, stop=(text[10:14], "never"))[2] == Finish.STOP
        pair.forget()
        pair.ask("Hi", system="Be brief.", max_tokens=5, temperature=0)
        pair.ask(ids(7), max_tokens=3, temperature=0, ignore_eos=1)
        pair.forget()
        _, _, finish = pair.ask(TEXT, raw=True, temperature=0, ignore_eos=1, max_tokens=160)
        assert finish == (Finish.LENGTH if evicts else Finish.CAPACITY)
        if evicts:  # prompts longer than the cache, and a follow-up in a full one
            pair.forget()
            pair.ask(ids(400), max_tokens=30, temperature=0, ignore_eos=1)
            pair.ask(TEXT * 20, max_tokens=40, ignore_eos=1, seed=5, **WARM)
            assert pair.exported.use()["evicted"] > 0


@pytest.mark.parametrize(("policy", "dtype"), [("streaming", "f16"), ("kvzap", "f16"), exhaustive("h2o", "int8")])
def test_rows_of_a_system_prompt_stay(policy: str, dtype: str) -> None:
    """Saved states go on in the same session, and in one of fewer threads from the middle of a file."""
    with pair_of(MODEL, python={"keep": 24}, kv_policy=policy, kv_dtype=dtype, **FEW) as pair:
        bundled = pair.exported
        assert pair.python.model.system_rows(SYSTEM) == 24
        pair.ask(TEXT * 2, system=SYSTEM, max_tokens=40, temperature=0, ignore_eos=1)
        pair.ask(TEXT * 2, max_tokens=20, ignore_eos=1, seed=5, **WARM)
        assert bundled.use()["evicted"] > 100
        state = bundled.save()
        expected = pair.ask("And?", max_tokens=20, temperature=0, ignore_eos=1)
        bundled.rewind()
        bundled.load(state)
        assert bundled.answer("And?") == expected
        with (
            open_bundle(bundle_of(MODEL, kv_policy=policy, kv_dtype=dtype, **FEW)) as bundle,
            bundle.session(threads=1, max_tokens=20, temperature=0, ignore_eos=1) as other,
            TemporaryFile() as file,
        ):
            os.write(file.fileno(), b"before" + state)
            os.lseek(file.fileno(), len(b"before"), os.SEEK_SET)
            other.load_from(file.fileno())
            assert other.answer("And?") == expected
        bundled.rewind(100)  # the system's text stays
        pair.begun = False
        pair.ask(TEXT * 3, max_tokens=20, temperature=0, ignore_eos=1, system=SYSTEM, told=True)


def test_longrope_chooses_factors_by_the_whole_text() -> None:
    """The C library makes tokens word by word, the session block by block: both look 256 positions ahead."""
    with pair_of("phi3-longrope", kv_policy="h2o", **FEW) as pair:
        pair.ask("Hi " * 40, raw=True, max_tokens=4, temperature=0, ignore_eos=1)
        pair.ask(ids(300), max_tokens=4, temperature=0, ignore_eos=1)
        pair.forget()
        pair.ask(TEXT * 20, raw=True, max_tokens=60, temperature=0, ignore_eos=1)


def test_cancelled_answer_can_be_followed_up() -> None:
    with pair_of(MODEL, **STREAMING) as pair:
        pair.exported.set(temperature=0, ignore_eos=1)
        pair.exported.append(Role.USER, "Tell me a story")
        pieces, thread = list[Piece](), threading.Thread(target=pair.exported.cancel)
        for piece in pair.exported.pieces():
            pieces.append(piece)
            if len(pieces) == 5:
                thread.start()
        thread.join()
        assert pieces[-1].finish == Finish.INTERRUPTED
        tokens = [piece.token for piece in pieces if piece.token is not None]
        stream = pair.python.stream("Tell me a story", max_tokens=None, ignore_eos=True)
        for _ in stream:
            if len(pair.recorded) == len(tokens):
                pair.python.interrupt()
        assert pair.recorded == tokens
        pair.begun = True
        pair.ask("And then?", max_tokens=20, temperature=0)


@pytest.mark.parametrize(("name", "policy"), [
    ("qwen35", "h2o"),
    *(
        exhaustive(*each)
        for each in (
            ("gemma3", "h2o"), ("gemma4", "streaming"), ("gpt-oss", "h2o"), ("deepseek2", "h2o"), ("lfm2", "streaming"),
            ("lfm2moe", "streaming"), ("nemotron_h", "streaming"), ("jamba", "h2o"), ("falcon-mamba", "streaming"),
            ("granitehybrid", "h2o"), ("llama-window", "window"), ("spm", "streaming"), ("qwen3moe", "streaming"),
            ("qwen35moe", "h2o"), ("phi3", "kvzap"), ("gemma4", "kvzap"), ("deepseek2", "kvzap"),
            ("phi3-longrope", "kvzap"), ("qwen35", "kvzap"),
        )
    ),
])  # fmt: skip
def test_models_of_several_forms_answer_as_the_python_session(name: str, policy: str) -> None:
    """Steps, chunks, prompts longer than the cache, and a conversation that is saved in the middle and loaded."""
    rows = ROWS | ({"kv_dtype": "int8"} if name == "falcon-mamba" else {})  # which have neither values nor scales
    with pair_of(name, **(rows | {"kv_policy": policy})) as pair:
        pair.ask(TEXT, raw=True, max_tokens=10, temperature=0, ignore_eos=1)
        pair.ask(ids(40), max_tokens=20, ignore_eos=1, seed=1, **WARM)
        pair.ask(ids(150), max_tokens=80, temperature=0, ignore_eos=1)
        assert pair.exported.use()["evicted"] > 0
        state, expected = pair.exported.save(), pair.ask(ids(9), max_tokens=9, temperature=0, ignore_eos=1)
        pair.exported.rewind()
        pair.exported.load(state)
        assert pair.exported.answer(ids(9), Role.IDS) == expected
        pair.forget()
        pair.ask(TEXT, raw=True, max_tokens=10, temperature=0, ignore_eos=1)


@pytest.mark.parametrize(("name", "says"), [
    (MODEL, "append the conversation again"), ("qwen35", "cannot be taken back: rewind all"),
    exhaustive("lfm2", "cannot be taken back: rewind all"),
])  # fmt: skip
def test_turns_can_be_rewound(name: str, says: str) -> None:
    """Where no snapshot of a fixed state is left, rows before the turn run again with the next prompt; so do those of a
    saved state."""
    with pair_of(name, kv_policy="streaming", **(ROWS | {"max_kv_size": 160})) as pair:
        turns = [ids(20, seed) for seed in range(3)]
        ask = partial(pair.ask, max_tokens=5, seed=1, ignore_eos=1, **WARM)
        expected = [ask(turn) for turn in turns]
        state = pair.exported.save()
        pair.exported.rewind(1)
        assert pair.exported.answer(turns[2], Role.IDS) == expected[2]
        pair.exported.append(Role.IDS, ids(30))
        pair.exported.next()  # an answer that is broken off
        pair.exported.rewind(1)
        pair.exported.append(Role.IDS, ids(3))  # a question that has not been run
        pair.exported.rewind(1)
        ask(ids(7))
        pair.exported.rewind(1)
        for count in (2, 1, 2):
            pair.exported.rewind(count)
            assert [pair.exported.answer(turn, Role.IDS) for turn in turns[3 - count :]] == expected[3 - count :]
        pair.exported.rewind(3)
        pair.exported.load(state)
        pair.exported.rewind(2)
        assert pair.exported.save() != state
        assert [pair.exported.answer(turn, Role.IDS) for turn in turns[1:]] == expected[1:]
        pair.exported.answer(ids(150), Role.IDS)
        with pytest.raises(UnsupportedError, match=says):
            pair.exported.rewind(1)


@pytest.mark.parametrize(("name", "policy"), [(MODEL, "streaming"), ("qwen35", "streaming"), exhaustive(MODEL, "h2o")])
def test_new_conversation_keeps_system_rows(name: str, policy: str) -> None:
    with pair_of(name, kv_policy=policy, **ROWS) as pair:
        told, rows = {"system": SYSTEM, "told": True}, pair.python.model.system_rows(SYSTEM)
        kept = 0 if policy == "h2o" else rows  # of attention they have what later texts paid

        def begin_anew() -> None:
            pair.exported.rewind(100)
            assert pair.exported.use()["rows"] == kept
            pair.begun = False

        first = pair.ask("Hi", system=SYSTEM, **GREEDY)
        pair.ask("And?", **GREEDY)
        pair.ask("So?", **GREEDY)
        begin_anew()
        before = pair.exported.use()["tokens"]
        assert pair.ask("Hi", **told, **GREEDY) == first
        assert pair.exported.use()["tokens"] - before <= pair.exported.use()["rows"] - kept
        begin_anew()
        state = pair.exported.save()
        second = pair.ask(TEXT, **told, **GREEDY)
        pair.exported.rewind()
        assert pair.exported.use()["rows"] == 0
        pair.exported.load(state)
        assert pair.exported.answer(TEXT) == second
        begin_anew()
        pair.ask("Hi", system="Be long, and tell me all.", **GREEDY)  # another system's text
        pair.exported.rewind(1)
        pair.exported.append(Role.SYSTEM, "")
        assert pair.exported.use()["rows"] == 0


def test_earlier_conversation_runs_from_its_text() -> None:
    with pair_of(MODEL, **STREAMING) as pair:
        turns = [("Hi", "Hello."), ("And?", "")]
        for text, answer in turns:
            pair.exported.append(Role.USER, text)
            pair.exported.append(Role.ASSISTANT, answer)
        past = pair.python.model.past(turns)
        follow_up = pair.python.model.follow_up("Why?").first(None)
        pair.exported.set(temperature=0, max_tokens=8)
        found, _, _ = pair.exported.answer("Why?")
        pair.python.generate(np.concatenate([past, follow_up]), max_tokens=8)
        assert found == pair.recorded[: len(found)]
        pair.begun = True
        pair.ask("So?", max_tokens=8, temperature=0)


def test_trims_are_those_of_the_python_session() -> None:
    with pair_of(MODEL, kv_policy="streaming", max_kv_size=500, prefill_step_size=16, threads=1) as pair:
        pair.ask(ids(480), max_tokens=4, temperature=0, ignore_eos=1)
        before = pair.exported.use()
        for level, part in ((Trim.SOFT, 0.0), (Trim.HALF, 0.5), (Trim.ALL, 1.0)):
            pair.exported.trim(level)
            pair.python.trim(part)
            pair.check_rows()
            pair.ask(ids(9), max_tokens=4, temperature=0, ignore_eos=1)
        after = pair.exported.use()
        assert after["capacity"] == 256
        assert after["kv"] < 0.6 * before["kv"]


@pytest.mark.skipif(sys.platform != "linux", reason="the resident set is read from /proc")
def test_usage_counts_anonymous_and_swapped_memory(tmp_path: Path) -> None:
    """Pages that no file backs, of the whole process."""
    size, path = 64 << 20, tmp_path / "mapped"
    path.write_bytes(bytes(range(256)) * (size >> 8))
    with open_bundle(bundle_of(MODEL, **STREAMING)) as bundle, bundle.session() as session:
        use = session.use
        before = use()["anonymous"] + use()["swapped"]
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
            assert sum(mapped[::4096]) >= 0  # reads every page
            assert abs(use()["anonymous"] + use()["swapped"] - before) < size // 2
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own:
            own[::4096] = bytes([1]) * (size >> 12)
            grown = use()["anonymous"] + use()["swapped"] - before
        assert size // 2 < grown < 3 * size // 2
        assert use()["anonymous"] + use()["swapped"] - before < size // 2


def test_question_that_no_longer_fits_ends_its_answer() -> None:
    folder = bundle_of(MODEL, kv_policy="full", max_kv_size=500, prefill_step_size=16, threads=1)
    with open_bundle(folder) as bundle, bundle.session(ignore_eos=1) as session:
        session.append(Role.USER, TEXT * 8)
        session.trim(Trim.ALL)  # rows that nothing has been written to, which the question waits for
        piece = session.next()
        assert (piece.token, piece.finish) == (None, Finish.MEMORY)
        assert session.use()["seconds"] < 60


@pytest.mark.parametrize(("options", "error", "says"), [
    ({"temperature": math.nan}, InputError, "temperature must be from 0 to 100"),
    ({"repeat_penalty": 0}, InputError, r"repeat_penalty must be from 0\.01 to 100, or less than 0"),
    ({"presence_penalty": -3}, InputError, "presence_penalty must be from -2 to 2$"),
    ({"max_temp": -1}, InputError, "max_temp must be more than 0, or 0 for no limit"),
    ({"dry_last_n": 65536}, InputError, "dry_last_n must be from 0 to 4096, or less than 0 for 1024$"),
    ({"isa": "sse9"}, UnsupportedError, "sse9"), ({"threads": 3}, InputError, "threads must be at most 2"),
    ({"speculate": 2}, InputError, "2 is not an edge_speculate"),
    ({"stop": ["a"] * 17}, InputError, "stop must be at most 16 texts"),
    ({"stop": ["a", b"\xff" * 50]}, InputError, "stop string 1 is longer than 128 bytes"),
    ({"stop": ["a", None]}, InputError, "stop string 1 is NULL"),
])  # fmt: skip
def test_invalid_options_are_refused(options: dict[str, Any], error: type[EdgeError], says: str) -> None:
    with open_bundle(bundle_of(MODEL, **STREAMING)) as bundle, pytest.raises(error, match=says):
        bundle.session(**options)


def test_calls_out_of_order_raise_one_line() -> None:
    folder = bundle_of(MODEL, **ROWS | {"kv_policy": "full"})
    with open_bundle(folder) as bundle, bundle.session(ignore_eos=1, max_tokens=3) as session:
        assert bundle.info()["policy"] == "full"

        refused(BusyError, r"the model has open sessions \(1\): end them first", bundle.close)
        refused(InputError, "a bias is of token 99999", session.bias, {99999: 1.0})
        refused(InputError, "edge_append first", session.next)
        refused(InputError, "must follow a user's text", session.append, Role.ASSISTANT, "Hi")
        refused(InputError, "free", session.append, Role.USER, TEXT * 6)
        assert session.use()["rows"] == 0
        session.append(Role.USER, "Hi")
        refused(InputError, "comes first", session.append, Role.SYSTEM, "Hi")
        session.next()
        refused(InputError, "an answer is being written", session.bias, {5: 1.0})
        assert [piece.finish for piece in session.pieces()][-1] == Finish.LENGTH
        refused(InputError, "edge_append first", session.next)
        for call, *arguments in (("edge_append", Role.USER, b"Hi"), ("edge_tokenize", b"Hi")):
            more = (0, None, c_size_t(0)) if call == "edge_tokenize" else ()
            refused(InputError, "more bytes than", session._call, call, *arguments, c_size_t(-1), *more)
        refused(InputError, "is not a token", session.append, Role.IDS, [5, 99999])
        refused(InputError, "empty", session.append, Role.RAW, "")


FORKED = """
import json, os, signal, sys
from ctypes_bundle import open_bundle
from edge.apps.enums import Role
from edge.errors import BusyError
options = {"threads": 2, "temperature": 0, "ignore_eos": 1, "max_tokens": 8}
with open_bundle(sys.argv[1]) as bundle, bundle.session(**options) as session:
    answer = session.answer("Hi")
    ours, theirs = os.pipe()
    if os.fork() == 0:
        signal.alarm(100)  # it would wait for the parent's threads
        said = []
        for call in (lambda: session.append(Role.USER, "And?"), session.next, session.set, session.rewind, session.use):
            try:
                call()
            except BusyError as error:
                said.append(str(error))
        session.cancel()
        session.end()
        with bundle.session(**options) as own:
            said.append(own.answer("Hi") == answer)
        bundle.close()
        os.write(theirs, json.dumps(said).encode())
        os._exit(0)
    os.close(theirs)
    said = json.loads(os.read(ours, 4096) or "null")
    os.wait()
    session.rewind()
    print(json.dumps([os.getpid(), said, session.answer("Hi") == answer]))
"""


def test_forked_child_begins_sessions_of_its_own() -> None:
    child = run_child(FORKED, bundle_of(MODEL, **STREAMING))
    assert child.status == 0, child.errors
    process, (*said, same), still_same = child.output
    assert set(said) == {
        f"the session belongs to process {process}, and a forked child has none of its threads: begin one in the child"
    }
    assert (len(said), same, still_same) == (5, True, True)


@pytest.mark.skipif(sys.platform != "linux", reason="ids are Linux's")
def test_thread_ids_name_the_computing_threads() -> None:
    def tasks() -> set[int]:
        return {int(each.name) for each in Path("/proc/self/task").iterdir()}

    with open_bundle(bundle_of(MODEL, **STREAMING)) as bundle:
        before = tasks()
        with bundle.session(threads=2) as session:
            own, other = session.thread_ids()
            assert own == threading.get_native_id()
            assert other in tasks() - before
            assert session.thread_ids(1) == [own]
            session.set(threads=1)
            assert session.thread_ids() == [own]


DYING = """
import ctypes, json, os, sys
from pathlib import Path
from ctypes_bundle import open_bundle
from edge.errors import EngineError
libc, tasks = ctypes.CDLL(None), lambda: {int(each.name) for each in Path("/proc/self/task").iterdir()}
libc.signal(60, libc.syscall)  # SIGRTMIN + 26: the handler is called with 60, the number of the system call exit
with open_bundle(sys.argv[1]) as bundle:
    before, said = tasks(), []
    with bundle.session(threads=2, temperature=0, max_tokens=4, ignore_eos=1) as session:
        session.answer("Hi")
        (thread,) = tasks() - before
        libc.syscall(234, os.getpid(), thread, 60)  # tgkill
        while thread in tasks():
            pass
        for _ in range(2):
            try:
                while True:  # until both threads take part in a pass
                    session.answer("Hi")
            except EngineError as error:
                said.append(str(error))
    with bundle.session(threads=2, temperature=0, max_tokens=4, ignore_eos=1) as session:
        session.answer("Hi")
print(json.dumps(said))
"""


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="needs Linux on x86-64")
def test_thread_ended_by_the_system_is_an_error() -> None:
    child = run_child(DYING, bundle_of(MODEL, **STREAMING))
    assert child.status == 0, child.errors
    assert child.output == ["the system has ended a thread of the session: end it, and begin another"] * 2


CUT = """
import json, os, sys
from pathlib import Path
from ctypes_bundle import open_bundle
from edge.apps.enums import Role
from edge.errors import ModelFormatError
path, said = Path(sys.argv[1], "model.edge"), []

def refused(call):
    try:
        call()
    except ModelFormatError as error:
        said.append(str(error))

whole = path.read_bytes()
for size in (0, len(whole) // 2, len(whole) - 1):
    path.write_bytes(whole)
    bundle = open_bundle(sys.argv[1], sys.argv[2])
    idle, session = bundle.session(), bundle.session(threads=2, ignore_eos=1)
    session.append(Role.USER, "Hi")
    session.next()
    os.truncate(path, size)
    for call in (session.next, session.rewind, session.use, session.save, lambda: session.tokenize("x"),
                 lambda: idle.append(Role.USER, "Hi"), bundle.session, bundle.info):
        refused(call)
    session.end()
    idle.end()
    bundle.close()
path.write_bytes(whole)
print(json.dumps(said))
"""


def test_truncated_open_file_is_an_error(tmp_path: Path) -> None:
    folder = bundle_of(MODEL, **STREAMING)
    shutil.copy(folder / "model.edge", tmp_path)
    child = run_child(CUT, tmp_path, folder / "libedge.so")
    assert child.status == 0, child.errors
    assert len(child.output) == 3 * 8
    assert set(child.output) == {"model.edge was cut short while it was open: copy it again, and open that one"}


# Programs in C that call the library


@pytest.mark.parametrize(("program", "numbers", "name"), [
    ("fuzz_api.c", (1, 400), MODEL), ("fuzz_api.c", (1, 400), "qwen35"), ("soak.c", (60,), MODEL),
    exhaustive("soak.c", (1000,), MODEL), ("threads.c", (3,), MODEL),
])  # fmt: skip
def test_calls_in_any_order_and_on_several_threads_leave_nothing(
    program: str, numbers: tuple[int, ...], name: str
) -> None:
    """fuzz_api: from two threads; soak: sessions end without threads and memory; threads: sessions of one model."""
    model = bundle_of(name, **STREAMING) / "model.edge"
    archive = str(model.with_name("libedge.a"))
    said_by(build([program], ("-Wl,--whole-archive", archive, "-Wl,--no-whole-archive")), model, *numbers)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "policy"), [(MODEL, "streaming"), (MODEL, "h2o"), ("qwen35", "streaming")])
@pytest.mark.parametrize("flags", [CHECKED, ("-fsanitize=thread",)], ids=["address", "thread"])
def test_sanitizers_find_nothing(flags: tuple[str, ...], name: str, policy: str) -> None:
    """In libraries that draft always."""
    for program, numbers in (("fuzz_api.c", (1, 3000 if flags == CHECKED else 800)), ("threads.c", (20,))):
        model, built = build_with((program, "eager_drafts.c"), name, *flags, **ROWS | {"kv_policy": policy})
        said_by(built, model, *numbers)
