"""The radix tree of KV blocks and its folder: what is shared, what goes first, and what is never believed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_rows import WIDTH, PrefixRows, longest_common_prefix, rows_for, tokens_of
from test_gguf_file import MUTATIONS, Mutation, mutate

from edge.errors import InputError
from edge.prompt_cache import disk
from edge.prompt_cache.cache import PromptCache
from edge.prompt_cache.cost import Cost
from edge.prompt_cache.tree import BLOCK, Block, prefix_name, root_name
from edge.types import IntArray

ROW_BYTES = 8 * WIDTH
BLOCK_BYTES = BLOCK * ROW_BYTES + 4 * BLOCK + 100  # of a whole block, its file's head with it, roundly
PROMPT = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 90)), min_size=1, max_size=4).map(
    lambda parts: tokens_of(*parts)
)
CACHES = pytest.mark.parametrize("kind", ["memory", "folder", "both"])


def make_cache(kind: str, folder: Path, size: int = 1 << 30) -> PromptCache:
    if kind == "memory":
        return PromptCache(memory=f"{size}B")
    return PromptCache(folder, size=f"{size}B", memory=None if kind == "folder" else f"{size // 3}B")


def run(cache: PromptCache, tokens: IntArray, key: str = "model", capacity: int = 1 << 20) -> int:
    """As a session does: reuse, run the rest, store. Returns the tokens reused."""
    kv = PrefixRows(key, capacity)
    reused = cache.restore(kv, tokens, tokens.size - 1)
    assert reused == kv.length < tokens.size
    np.testing.assert_array_equal(kv.rows, rows_for(tokens[:reused]).reshape(-1, WIDTH))
    kv.run(tokens)
    cache.store(kv, tokens)
    return reused


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_in(folder))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path) / "prompts"


# What is shared


@CACHES
@settings(max_examples=examples(40))
@given(prompts=st.lists(PROMPT, min_size=1, max_size=8))
def test_exactly_longest_common_prefix_is_reused(kind: str, prompts: list[IntArray]) -> None:
    with tempfile.TemporaryDirectory() as name:
        cache = make_cache(kind, Path(name))
        for index, prompt in enumerate(prompts):
            expected = min(longest_common_prefix(prompt, prompts[:index]), prompt.size - 1)
            assert run(cache, prompt) == expected


@CACHES
def test_common_prefix_is_kept_once(kind: str, folder: Path) -> None:
    cache, begin = make_cache(kind, folder), tokens_of((1, 5 * BLOCK))
    run(cache, tokens_of((1, 5 * BLOCK), (2, 3)))
    kv = PrefixRows()
    prompt = np.concatenate([begin, tokens_of((3, 7))])
    cache.restore(kv, prompt, prompt.size - 1)
    kv.run(prompt)
    cache.store(kv, prompt)
    assert kv.saved == 7


@CACHES
def test_models_and_settings_do_not_mix(kind: str, folder: Path) -> None:
    cache, prompt = make_cache(kind, folder), tokens_of((1, 200))
    assert [run(cache, prompt, key) for key in ("one", "other", "one", "other")] == [0, 0, 199, 199]


# Limits


@CACHES
@settings(max_examples=examples(25))
@given(
    prompts=st.lists(st.tuples(PROMPT, st.sampled_from(["one", "other"])), min_size=2, max_size=14),
    blocks=st.integers(1, 9),
)
def test_limit_holds_and_blocks_stay_reachable(kind: str, prompts: list[tuple[IntArray, str]], blocks: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, limit = Path(name), blocks * BLOCK_BYTES
        cache = make_cache(kind, folder, limit)
        for prompt, key in prompts:
            run(cache, prompt, key)
            assert cache._tree.nbytes <= cache.memory
            assert bytes_in(folder) <= limit
            in_folder = [(path.stem[:24], path.stem[25:]) for path in files_in(folder)]
            in_memory = [(block.parent, block.name) for block in cache._tree._blocks.values()]
            roots = {root_name("one"), root_name("other")}
            assert {parent for parent, _ in in_folder} <= roots | {each for _, each in in_folder}
            known = roots | {each for _, each in [*in_folder, *in_memory]}
            assert {parent for parent, _ in in_memory} <= known
            assert cache._tree.nbytes == sum(block.nbytes for block in cache._tree._blocks.values())
            assert not cache._tree._holders


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_least_recently_used_blocks_are_evicted_first(kind: str, folder: Path) -> None:
    cache = make_cache(kind, folder, 5 * BLOCK_BYTES)
    prompts = [tokens_of((value, 2 * BLOCK)) for value in (1, 2, 3)]
    run(cache, prompts[0])
    time.sleep(0.02)  # file times may be as coarse as a clock tick
    run(cache, prompts[1])
    time.sleep(0.02)
    run(cache, prompts[0])
    time.sleep(0.02)
    run(cache, prompts[2])
    kvs = [PrefixRows() for _ in prompts]
    reused = [cache.restore(kv, prompt, prompt.size) for kv, prompt in zip(kvs, prompts, strict=True)]
    assert reused[0] == reused[2] == 2 * BLOCK
    assert reused[1] < 2 * BLOCK


def test_expensive_prefix_outlives_cheap_one() -> None:
    """Of two prefixes used equally recently, the cheaper one is evicted first; unused, the other follows."""
    cache = PromptCache(memory=f"{4 * BLOCK_BYTES}B")
    dear, cheap, *others = (tokens_of((value, 2 * BLOCK)) for value in range(1, 60))

    def store(prompt: IntArray, cost: Cost) -> None:
        kv = PrefixRows()
        kv.run(prompt)
        cache.store(kv, prompt, cost)

    def held(prompt: IntArray) -> bool:
        name = prefix_name(root_name("model"), prompt[:BLOCK])
        return name in cache._tree._blocks

    store(dear, Cost(8.0))
    store(cheap, Cost(1.0))
    store(others[0], Cost(1.0))
    assert (held(dear), held(cheap)) == (True, False)
    for other in others[1:]:
        store(other, Cost(1.0))
    assert not held(dear)


# What is never believed


@settings(max_examples=examples(60))
@given(data=st.data(), mutation=MUTATIONS)
def test_damaged_blocks_are_never_restored(data: st.DataObject, mutation: Mutation) -> None:
    """Whatever happens to the files, what is restored is right (see `run`), and what was lost is stored again."""
    prompt = tokens_of((1, 2 * BLOCK + 20), (2, 60))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = PromptCache(folder)
        run(cache, prompt)
        path = data.draw(st.sampled_from(files_in(folder)))
        content = path.read_bytes()
        damaged = mutate(content, [mutation])
        path.write_bytes(damaged)
        assert (run(cache, prompt) == prompt.size - 1) == (damaged == content)
        assert run(cache, prompt) == prompt.size - 1


THINGS = ["folder", "pipe", "link", "loop", "huge", "moved", "forged"]


def replace_by(path: Path, thing: str, other: Path) -> None:
    """Another thing in place of a file of the folder, or at a name where none was."""
    if thing not in ("moved", "forged"):
        path.unlink(missing_ok=True)
    if thing == "folder":
        path.mkdir()
    elif thing == "pipe":
        os.mkfifo(path)
    elif thing in ("link", "loop"):
        path.symlink_to("/etc/passwd" if thing == "link" else path.name)
    elif thing == "huge":
        with open(path, "wb") as file:
            file.truncate(1 << 42)
    elif thing == "moved" and other.is_file() and other != path:
        os.replace(other, path)
    elif thing == "forged" and (block := disk._parse(disk._content(path, 1 << 20), path.name[:24])):
        short = Block(block.parent, block.tokens, bytes(block.data)[:-8])  # rows that no cache can take
        head = disk._HEAD.pack(disk._MAGIC, disk._checksum(short), short.tokens.size, len(short.data))
        path.write_bytes(head + short.tokens.tobytes() + short.data)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_odd_cache_folders_never_fail_a_run(data: st.DataObject) -> None:
    """Its lock and its temporary files, too. What is restored is right (see `run`)."""
    prompt = tokens_of((1, 2 * BLOCK + 20), (2, 60))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(PromptCache(folder), prompt)
        files = files_in(folder)
        odd = [
            folder / ".lock", folder / f".1-abc-{files[0].name}", folder / ("0" * 24 + "-" + "1" * 24 + ".kv"), *files,
        ]  # fmt: skip
        chosen = data.draw(st.lists(st.tuples(st.sampled_from(odd), st.sampled_from(THINGS)), min_size=1, max_size=4))
        for path, thing in chosen:
            if not path.is_dir() or path.is_symlink():
                replace_by(path, thing, data.draw(st.sampled_from(files)))
        cache = PromptCache(folder)
        for _ in range(2):
            assert run(cache, prompt) <= prompt.size - 1


def test_block_that_others_replace_meanwhile_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is gone when it is opened, and there again when it is looked at."""
    cache, prompt = PromptCache(folder), tokens_of((1, BLOCK))
    run(cache, prompt)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "_content", lambda path, most: b"")
        assert run(cache, prompt) == 0
    assert (run(cache, prompt), caplog.messages) == (prompt.size - 1, [])


def test_files_of_others_stay_where_they_are(folder: Path) -> None:
    folder.mkdir()
    others = [folder / each for each in ("notes.txt", "a.kv", ".hidden", f"{'0' * 24}-{'g' * 24}.kv")]
    for other in others:
        other.write_bytes(bytes(1000))
    cache = PromptCache(folder, size=f"{2 * BLOCK_BYTES}B")
    for value in range(5):
        run(cache, tokens_of((value, BLOCK + 9)))
    assert all(other.read_bytes() == bytes(1000) for other in others)


def test_prompt_cache_is_private(folder: Path) -> None:
    run(PromptCache(folder), tokens_of((1, 100)))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in files_in(folder))


def test_unusable_folder_raises_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="is a file: name a folder") as caught:
        PromptCache(tmp_path / "file")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="--prompt-cache-size"):
        PromptCache(tmp_path / "new", size="many")
    with pytest.raises(InputError, match="a folder, or memory"):
        PromptCache()


def test_vanished_folder_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, prompt = PromptCache(folder), tokens_of((1, 100))
    folder.rmdir()
    with caplog.at_level(logging.WARNING, "edge"):
        assert run(cache, prompt) == 0
    (message,) = caplog.messages
    assert "could not be written" in message


# Processes

_WRITER = """
import sys
import numpy as np
from prefix_rows import PrefixRows, rows_for
from edge.prompt_cache import disk
from edge.prompt_cache.cache import PromptCache

folder, seed, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
random = np.random.default_rng(seed)
cache, turns = PromptCache(folder, size=f"{size}B"), 0
print("ready", flush=True)
while turns < int(sys.argv[4]):
    tokens = np.repeat(random.integers(1, 4, 3), random.integers(1, 90, 3)).astype(np.int32)
    kv = PrefixRows()
    reused = cache.restore(kv, tokens, tokens.size - 1)
    assert (kv.rows == rows_for(tokens[:reused]).reshape(kv.rows.shape)).all()
    kv.run(tokens)
    cache.store(kv, tokens)
    turns += 1
print(turns)
"""


def start_writer(folder: Path, seed: int, size: int, turns: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _WRITER, str(folder), str(seed), str(size), str(turns)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_share_a_prompt_cache(folder: Path) -> None:
    """Each checks every row that it restores. The limit makes them remove each other's files all the time."""
    limit = 6 * BLOCK_BYTES
    writers = [start_writer(folder, seed, limit, turns=60) for seed in range(3)]
    for writer in writers:
        output, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors
        assert output.split() == ["ready", "60"]
        assert errors == ""
    assert bytes_in(folder) <= limit
    assert {path.suffix for path in folder.iterdir()} <= {".kv"}


def test_killed_writers_leave_only_whole_blocks(folder: Path) -> None:
    limit = 6 * BLOCK_BYTES
    for seed in range(6):
        writer = start_writer(folder, seed, limit, turns=1 << 30)
        assert writer.stdout.readline() == "ready\n"
        time.sleep(0.05 + 0.02 * seed)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    (folder / f".{writer.pid}-abc123-{'0' * 24}-{'1' * 24}.kv").write_bytes(bytes(50))  # a write that never ended
    cache = PromptCache(folder, size=f"{limit}B")
    for value in range(1, 4):
        run(cache, tokens_of((value, 2 * BLOCK)))
    assert bytes_in(folder) <= limit
    assert {path.suffix for path in folder.iterdir() if path.name != ".lock"} == {".kv"}
    assert not [path for path in folder.iterdir() if path.name.startswith(".") and path.name != ".lock"]
