"""The enums of edge.h in every language are those of the schema."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from runtime_library import RUNTIME

from edge.exporting.enums import FILES, Finish, Role, Status, Trim, generated
from edge.run.report import StopReason


@pytest.mark.parametrize("name", FILES)
def test_files_have_what_the_schema_generates(name: str) -> None:
    text = (RUNTIME.parent / name).read_text(encoding="utf-8")
    assert text == generated(name)  # else: python -m edge.exporting.enums


def test_every_member_is_in_edge_h() -> None:
    text = (RUNTIME / "edge.h").read_text(encoding="utf-8")
    header = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    for kind in (Status, Role, Finish, Trim):
        assert text.count(f"/* generated: {kind.__name__} */") == 1
        for each in kind:
            assert re.search(rf"^[^#;]*\bEDGE_(TRIM_)?{each.name}\b( = {each.value})?,?", header, re.MULTILINE)


def test_answers_end_for_the_reasons_of_reports() -> None:
    words = {each.name.lower() for each in Finish if each != Finish.GOING}
    assert words == set(get_args(StopReason)) - {"terminated", "failed"}  # by a signal; an error, of which there is a status
