"""claims.md: the tests that it names are there, and each engine has rows."""

from __future__ import annotations

import re
from pathlib import Path

from edge.backends import backend_names

TESTS = Path(__file__).parent


def test_claims_name_tests_that_there_are() -> None:
    rows = [line.split("|")[1:-1] for line in (TESTS / "claims.md").read_text().splitlines() if line.startswith("| ")]
    claims = [(where, re.fullmatch(r" `(.+)::(.+)` ", test)) for _, where, test in rows if "`" in test]
    assert len(claims) > 100
    for _, named in claims:
        assert named
        file, name = named.groups()
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), f"{file} has no {name}"
    assert {each for each in backend_names() if not any(each in where for where, _ in claims)} == set()
