"""Downloads from a Hub: the cache folder that huggingface_hub shares, resumption, hashes, and all that goes wrong."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_server import COMMIT, NAME, VARIABLES, Hub, hub_with, serve, sha256

from edge.errors import CacheError, DownloadError, InputError
from edge.hub import cache, download, http, settings
from edge.hub.names import Reference, parse_reference
from edge.hub.repository import look_up

DATA = bytes(range(256)) * 4_000  # about 1 MB, so that a download has several pieces
FILE = "model-Q8_0.gguf"
hub = hub_with({FILE: DATA, "docs/a b.txt": b"text", "config.json": b"{}", "model-Q4_0.gguf": b"x"})


def fetch(path: str = FILE, **more: Callable[..., None]) -> Path:
    repository = look_up(Reference(NAME))
    file = next(each for each in repository.files if each.path == path)
    return download.download(repository, file, **more)  # type: ignore[arg-type]


def folder() -> Path:
    return settings.hub_cache() / "models--tiny--model-GGUF"


def part() -> Path:
    return folder() / "blobs" / f"{sha256(DATA)}.incomplete"


def test_file_lies_where_hubs_own_tools_expect_it(hub: Hub) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch(progress=lambda done, total: seen.append((done, total)))
    assert path == folder() / "snapshots" / COMMIT / FILE
    assert path.read_bytes() == DATA
    assert os.readlink(path) == f"../../blobs/{sha256(DATA)}"
    assert (folder() / "refs" / "main").read_text() == COMMIT
    assert [each.name for each in (folder() / "blobs").iterdir()] == [sha256(DATA)]
    assert seen[-1] == (len(DATA), len(DATA))
    assert seen == sorted(seen)
    assert any(0 < done < len(DATA) for done, _ in seen)
    count = len(hub.ranges())
    assert fetch() == path
    assert len(hub.ranges()) == count  # nothing is downloaded twice
    assert fetch("docs/a b.txt").read_bytes() == b"text"  # its name needs quoting, and lies in a folder


_THEIRS = """
import sys
from huggingface_hub import hf_hub_download, scan_cache_dir
from huggingface_hub.utils import disable_progress_bars
disable_progress_bars()
repository, ours, theirs = sys.argv[1:]
print(hf_hub_download(repository, ours, local_files_only=True))
print(hf_hub_download(repository, theirs))
found = scan_cache_dir()
print(len(found.warnings), *[file.file_name for repo in found.repos for rev in repo.revisions for file in rev.files])
"""


def test_hub_libraries_find_each_others_files(hub: Hub) -> None:
    path = fetch()
    done = subprocess.run(
        [sys.executable, "-c", _THEIRS, NAME, FILE, "model-Q4_0.gguf"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    ours, theirs, scanned = done.stdout.splitlines()
    assert Path(ours) == path
    assert scanned.startswith("0 ")
    assert set(scanned.split()[1:]) == {FILE, "model-Q4_0.gguf"}
    assert cache.find_cached(Reference(NAME, quant="Q4_0")) == Path(theirs)
    assert {each.file for each in cache.cached_files()} == {FILE, "model-Q4_0.gguf"}
    count = len(hub.ranges())
    assert fetch("model-Q4_0.gguf") == Path(theirs)
    assert len(hub.ranges()) == count


def test_cut_connection_is_resumed(hub: Hub) -> None:
    hub.faults.cut = [300_000, 200_000, 0]
    assert fetch().read_bytes() == DATA
    assert hub.ranges() == [None, "bytes=300000-", "bytes=500000-", "bytes=500000-"]


@pytest.mark.parametrize("no_range", [False, True])
def test_partial_download_asks_for_the_rest(hub: Hub, no_range: bool) -> None:
    hub.faults.no_range = no_range
    part().parent.mkdir(parents=True)
    part().write_bytes(DATA[:400_000])
    assert fetch().read_bytes() == DATA
    assert hub.ranges() == ["bytes=400000-"]


def test_wrong_hash_is_never_kept(hub: Hub) -> None:
    hub.faults.damage = True
    with pytest.raises(DownloadError, match=r"is damaged: its hash is .* was deleted, so try again"):
        fetch()
    assert list((folder() / "blobs").iterdir()) == []
    assert not (folder() / "snapshots").exists()
    hub.faults.damage = False
    part().write_bytes(b"other" + DATA[5:400_000])  # a part of another file
    with pytest.raises(DownloadError, match="is damaged"):
        fetch()
    assert fetch().read_bytes() == DATA


def test_file_of_another_size_than_listed_is_refused(hub: Hub) -> None:
    hub.faults.listed = {"lfs": {"oid": sha256(DATA), "size": len(DATA) + 1}}
    with pytest.raises(DownloadError, match=f"has {len(DATA)} bytes, the Hub lists {len(DATA) + 1}"):
        fetch()


def test_busy_servers_are_asked_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(http.time, "sleep", pauses.append)
    hub.faults.status = [
        (429, {"Retry-After": "7"}), (503, {}), (500, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}),
    ]  # fmt: skip
    said: list[str] = []
    assert fetch(notice=said.append).read_bytes() == DATA
    assert [each for each in pauses if each] == [7, 0.002, 0.004]
    assert [each.split(" ", 1)[1] for each in said] == ["answers 429: trying again in 7 s"]
    (folder() / "blobs" / sha256(DATA)).unlink()
    hub.faults.status = [(429, {"Retry-After": "900"})]
    with pytest.raises(DownloadError, match="answers 429, and asks to wait 900 s"):
        fetch()
    hub.faults.status = [(502, {})] * 9
    with pytest.raises(DownloadError, match=r"answers 502 .6 attempts.$"):
        fetch()


def test_silent_servers_are_left(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_TIMEOUT_S", 0.05)
    hub.faults.stall = 0.2
    with pytest.raises(DownloadError, match="sent nothing"):
        fetch()


@pytest.mark.parametrize(("reference", "says"), [
    (Reference("tiny/none"), r"has no repository tiny/none \(did you mean tiny:1b\?\), or it is private and"),
    (Reference(NAME, "v2"), "has no revision 'v2'"),
])  # fmt: skip
def test_missing_repositories_are_named(hub: Hub, reference: Reference, says: str) -> None:
    with pytest.raises(InputError, match=says):
        look_up(reference, "did you mean tiny:1b?")


def test_gated_repositories_want_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated, hub.token = True, "hf_secret"
    with pytest.raises(DownloadError, match=f"is gated: accept its terms at {hub.url}/{NAME}, and set HF_TOKEN"):
        fetch()
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(DownloadError, match=r"is gated: accept its terms at .*, and ask for access there"):
        fetch()
    monkeypatch.delenv("HF_TOKEN")
    settings.hub_cache().parent.mkdir()
    (settings.hub_cache().parent / "token").write_text("hf_secret\n")
    assert fetch().read_bytes() == DATA


def test_token_goes_to_no_other_host(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serve(Hub({NAME: {FILE: DATA}})) as other:
        hub.faults.redirect = f"{other.url}/cdn"
        assert fetch().read_bytes() == DATA
    assert all(headers["authorization"] == "Bearer hf_secret" for _, _, headers in hub.asked)
    assert [("authorization" in headers) for _, _, headers in other.asked] == [False]
    assert settings.token_for("https://huggingface.co/x") is None
    monkeypatch.setenv("HF_ENDPOINT", "http://example.com")
    assert settings.token_for("http://example.com/x") is None  # not encrypted
    monkeypatch.setenv("HF_ENDPOINT", "https://example.com")
    assert settings.token_for("https://example.com/x") == "hf_secret"
    assert settings.token_for("https://example.com.evil.org/x") is None


def test_encrypted_connections_stay_encrypted() -> None:
    old = http.Request("https://huggingface.co/a")
    with pytest.raises(DownloadError, match="not encrypted: refused"):
        http._Redirects().redirect_request(old, None, 302, "", {}, "http://127.0.0.1/a")  # type: ignore[arg-type]


NO_ADDRESSES = [
    "http://[::1", "http://[x]y/", "http://127.0.0.1:99999", "http://127.0.0.1:x", "http://127.0.0.1:0",
    "http://me:pw@127.0.0.1", "http://a b", "http://a\xff", "file:///etc", "gopher://127.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize("where", NO_ADDRESSES)
def test_invalid_redirects_are_refused(hub: Hub, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    says = rf"^127\.0\.0\.1:\d+ refers to '{re.escape(where)}.*', which is no address of http or https$"
    hub.faults.redirect = where
    with pytest.raises(DownloadError, match=says):
        fetch()
    hub.faults.following = where
    with pytest.raises(DownloadError, match=says):
        look_up(Reference(NAME))
    monkeypatch.setenv("HF_ENDPOINT", where)
    with pytest.raises(InputError, match=r"HF_ENDPOINT .* is no address"):
        look_up(Reference(NAME))


@pytest.mark.parametrize(("listed", "says"), [
    ({"path": "../../../evil.gguf"}, "may not be written: .* is no path of a file"),
    ({"path": "/etc/evil.gguf"}, "may not be written"), ({"path": "a\\..\\..\\evil.gguf"}, "may not be written"),
    ({"path": "C:evil.gguf"}, "may not be written"), ({"path": "a\nb.gguf"}, "may not be written"),
    ({"path": 7}, "without size or hash"), ({"lfs": {"oid": "../../evil", "size": 3}}, "without size or hash"),
    ({"lfs": {"oid": "0" * 64, "size": -1}}, "without size or hash"),
    ({"lfs": {"oid": "0" * 64, "size": 1 << 60}}, "without size or hash"),
])  # fmt: skip
def test_hostile_listings_are_refused(hub: Hub, listed: dict[str, object], says: str) -> None:
    hub.faults.listed = listed
    with pytest.raises(DownloadError, match=says):
        look_up(Reference(NAME))


def test_a_full_disk_is_noticed_beforehand(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100_000}))
    with pytest.raises(CacheError, match="has 98 KiB left, and 17 MiB are needed for model"):
        fetch()
    assert hub.ranges() == []


def test_one_process_downloads_and_others_wait(hub: Hub) -> None:
    """The lock is the one that huggingface_hub takes."""
    from filelock import FileLock

    said: list[str] = []
    place = settings.hub_cache() / ".locks" / folder().name / f"{sha256(DATA)}.lock"
    place.parent.mkdir(parents=True)
    with FileLock(place):
        thread = threading.Thread(target=fetch, kwargs={"notice": said.append})
        thread.start()
        deadline = time.monotonic() + 120
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert said
        assert hub.ranges() == []
    thread.join(120)
    assert f"downloads {FILE}: waiting for it" in said[0]
    assert hub.ranges() == [None]


def test_offline_finds_cached_files_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch()
    hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids downloads"):
        look_up(Reference(NAME))
    assert cache.find_cached(Reference(NAME)) == folder() / "snapshots" / COMMIT / FILE
    assert cache.find_cached(Reference(NAME, COMMIT)) is not None
    assert cache.find_cached(Reference(NAME, quant="Q4_0")) is None
    assert hub.asked == []


@pytest.mark.parametrize("environment", [
    {}, {"HF_HOME": "~/models"}, {"XDG_CACHE_HOME": "/xdg"}, {"HF_HOME": "/h", "HF_HUB_CACHE": "$HOME/cache"},
    {"HUGGINGFACE_HUB_CACHE": "/old"}, {"HF_HUB_OFFLINE": "yes"}, {"TRANSFORMERS_OFFLINE": "true"},
    {"HF_HUB_OFFLINE": "0"}, {"HF_ENDPOINT": "https://mirror.example/"},
])  # fmt: skip
def test_variables_mean_what_they_mean_to_huggingface_hub(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    theirs = importlib.reload(importlib.import_module("huggingface_hub.constants"))
    assert str(settings.hub_cache()) == os.path.abspath(theirs.HF_HUB_CACHE)
    assert settings.is_offline() == theirs.HF_HUB_OFFLINE
    assert settings.endpoint() == theirs.ENDPOINT


@pytest.mark.parametrize(("name", "reference"), [
    ("hf.co/a/b", Reference("a/b")), ("hf.co/a/b:q4_k_m", Reference("a/b", quant="Q4_K_M")),
    ("https://huggingface.co/a/b-GGUF/tree/main", Reference("a/b-GGUF")),
    ("https://huggingface.co/a/b/blob/v1/x/y-Q8_0.gguf?download=true", Reference("a/b", "v1", file="x/y-Q8_0.gguf")),
    ("hf://a/b@v1", Reference("a/b", "v1")), ("hf:a/b.c", Reference("a/b.c")), ("HF.CO/a/b", Reference("a/b")),
])  # fmt: skip
def test_model_names_are_parsed(name: str, reference: Reference) -> None:
    assert parse_reference(name) == reference
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize("name", [
    "hf.co/a", "hf.co/../b", "hf.co/a/..", "hf.co/a--b/c", "hf.co/a/b/../../c", "hf.co/a/%2e%2e/x", "hf.co/a/b@..",
    "hf.co/a/b:", "hf.co/a /b", "hf.co/a/b/blob/main/../../../etc/passwd", "hf.co/" + "a" * 200 + "/b",
])  # fmt: skip
def test_invalid_model_names_are_refused(name: str) -> None:
    with pytest.raises(InputError):
        parse_reference(name)


def test_link_in_place_of_part_is_not_followed(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    part().parent.mkdir(parents=True)
    part().symlink_to(tmp_path / "precious")
    with pytest.raises(CacheError):
        fetch()
    assert (tmp_path / "precious").read_text() == "precious"


def test_names_never_leave_cache(hub: Hub) -> None:
    refs = folder() / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("../../../..")  # written by another program
    assert cache.find_cached(Reference(NAME)) is None
