"""Shares of the exhaustive tests: each begins where the one before it has ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from shares import Share

def pytest_configure(config):
    config.pluginmanager.register(Share({minutes}, False, Path(__file__).parent), "share")

def pytest_collection_modifyitems(config, items):
    items[:] = [each for each in items if not config.pluginmanager.get_plugin("share").is_done(each)]
"""


def test_share_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    def share(minutes: float) -> str:
        (tmp_path / "conftest.py").write_text(CONFTEST.format(tests=str(Path(__file__).parent), minutes=minutes))
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "."]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout

    (tmp_path / "test_it.py").write_text("def test_one(): pass\ndef test_two(): raise KeyError\n")
    assert "2 tests are left" in share(-1)
    assert "1 failed, 1 passed" in share(1)
    assert "1 failed in" in share(1)
    (tmp_path / "test_it.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    assert "no test is left" in share(1)
    assert "no tests ran" in share(1)
