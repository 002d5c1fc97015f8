"""Files that edge believes: what another user can have written is refused, wherever it lies."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edge.devices import records
from edge.devices.private import distrust, read_private
from edge.devices.profiles import add_profile, describe_host, find_profile
from edge.errors import InputError
from edge.prompt_cache.disk import BlockFiles
from edge.prompt_cache.tree import Block, root_name
from edge.run import history

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no modes")


def test_group_of_one_counts_as_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give each user a group, and a umask that lets it write."""
    import grp
    import pwd

    me = os.geteuid()
    status = os.stat_result((stat.S_IFREG | 0o664, 1, 1, 1, me, 777, 0, 0, 0, 0))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me"))
    for name, members, trusted in (
        ("me", [], True), ("me", ["me"], True), ("staff", [], False), ("me", ["eve"], False),
    ):  # fmt: skip
        group = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr(grp, "getgrgid", lambda gid, group=group: group)
        assert (distrust(status) is None) is trusted


def test_private_file_is_neither_link_nor_pipe(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_private(tmp_path / "file", 3) == b"123"
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")  # whose other end nobody opens
    for name, why in (("link", "link"), ("pipe", "regular"), ("none", "No such"), (".", "regular")):
        with pytest.raises(OSError, match=why):
            read_private(tmp_path / name, 3)


SHIPPED = Path(records.__file__).parent / "profiles" / "steam-deck.toml"


def test_profile_that_others_may_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_DEVICES", str(tmp_path / "devices"))
    before = os.umask(0)
    try:
        path = add_profile(describe_host())
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o777 for each in (path.parent, path)] == [0o700, 0o600]
    other = Path(shutil.copy(SHIPPED, path.parent))
    other.chmod(0o646)
    with pytest.raises(
        InputError, match=r"steam-deck.toml is not used, because other users may write to it \(mode 0646\)"
    ):
        find_profile("steam-deck")
    other.chmod(0o644)
    assert find_profile("steam-deck").name == "steam-deck"


def test_record_that_others_may_write_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EDGE_TUNING", str(tmp_path / "tuning"))
    subject = records.Subject("a cpu", "a family", 2, "avx2", "f16", {"hidden": 64})
    record = records.Record(
        name="mine", device="host", subject=subject, model="tiny", score="", values={}, kept="default", gain=1.0,
        comparison=None, trials=0, seconds=0.0, date="", versions={},
    )  # fmt: skip
    path = records.write_record(record)
    assert [each.stat().st_mode & 0o777 for each in (path.parent, path)] == [0o700, 0o600]
    assert record in records.read_records()
    path.chmod(0o606)
    with caplog.at_level(logging.WARNING):
        assert record not in records.read_records()
    assert "mine.json is ignored: other users may write to it (mode 0606)" in caplog.text
    path.parent.chmod(0o707)
    with pytest.raises(PermissionError, match="other users may write to it"):
        records.write_record(record)


def test_history_that_others_may_write_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_HISTORY", str(tmp_path / "history"))
    setting = history.Setting("cpu", "model", "cpu", "f16", 2)
    run = history.Run(1.0, setting, "label", "full", 64, history.Phase(8, 1.0, 4.0), None)
    history.append(run)
    path = history.history_path()
    whole = path.read_bytes()
    path.chmod(0o666)
    history.append(run)
    assert (history.earlier_runs(setting), path.read_bytes()) == ([], whole)
    path.chmod(0o600)
    path.parent.chmod(0o777)
    history.append(run)
    assert path.read_bytes() == whole
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    path.parent.chmod(0o700)
    history.append(run)
    assert not (tmp_path / "elsewhere").exists()


def test_prompt_cache_that_others_may_write_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, tokens = tmp_path / "new" / "prompts", np.arange(8, dtype=np.int32)
    files = BlockFiles(folder, 1 << 20)
    assert [each.stat().st_mode & 0o777 for each in (folder.parent, folder)] == [0o700, 0o700]
    root = root_name("a model")
    with files.writing():
        assert files.put(Block(root, tokens, bytes(512)))
    assert files.find(root, tokens)
    (path,) = folder.glob("*.kv")
    path.chmod(0o666)
    with caplog.at_level(logging.WARNING):
        assert files.find(root, tokens) is None
    assert "ignored a file of the prompt cache that others may have written" in caplog.text
    folder.chmod(0o777)
    with pytest.raises(InputError, match=r"cannot be used: other users may write to it \(mode 0777\)"):
        BlockFiles(folder, 1 << 20)
