"""What did not run is named, and fails in CI: small test folders of their own, run by pytest itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = """
import pytest

@pytest.mark.wing("tables")
def test_runs(): pass

@pytest.mark.skip(reason="root may read everything")
def test_for_users(): pass
"""
MISSING = "import pytest\npytest.importorskip('edge_is_no_such_package')\ndef test_it(): pass\n"
LATER = "import pytest\ndef test_runs(): pass\ndef test_it(): pytest.skip('no oclgrind')\n"
CONFTEST = """
import wings
from wings import Wings

wings.WINGS = ("tables",)

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Wings(whole=True, must=%s))

def pytest_collection_modifyitems(items):
    wings.mark_wings(items)
"""


@pytest.mark.parametrize(
    ("files", "must", "status", "said"),
    [
        ({"first": SMALL}, True, 0, ["every file of tests ran, and tables"]),
        ({"first": LATER, "second": MISSING}, True, 1, [
            "did not run: tests/test_second.py",
            "did not run: tables",
            "skipped, but not for good: tests/test_second.py: Skipped: could not import 'edge_is_no_such_package'",
            "skipped, but not for good: tests/test_first.py::test_it: Skipped: no oclgrind",
        ]),
        ({"second": LATER}, False, 0, ["did not run: tables"]),
    ],
)  # fmt: skip
def test_what_did_not_run_is_named(
    tmp_path: Path, files: dict[str, str], must: bool, status: int, said: list[str]
) -> None:
    (tmp_path / "tests").mkdir()
    for name, text in files.items():
        (tmp_path / "tests" / f"test_{name}.py").write_text(text)
    (tmp_path / "conftest.py").write_text(CONFTEST % must)
    (tmp_path / "pytest.ini").touch()
    shutil.copy(Path(__file__).with_name("wings.py"), tmp_path)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:cov", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == status, done.stdout
    section = [line for line in done.stdout.partition(" wings ")[2].split("\n")[1:] if line]
    assert [line[: len(each)] for line, each in zip(section, said, strict=False)] == said
    assert not section[len(said)].startswith(("did not", "skipped,"))


def test_programs_of_this_environment_are_found() -> None:
    """Node may come from a Python package."""
    assert str(Path(sys.executable).parent) in os.environ["PATH"].split(os.pathsep)
