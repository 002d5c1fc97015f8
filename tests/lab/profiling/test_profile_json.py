"""Profiles of `edge profile` as JSON: what is read, what is refused, and two of them side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import make_bare_profile, make_engine, make_profile, make_sustained

from edge.errors import InputError
from edge.lab.profiling.compare import Comparison, compare_profiles
from edge.lab.profiling.profile import Profile, read_profile
from edge.lab.profiling.sustained import Spread
from edge.lab.report.comparison import comparison_json, comparison_report
from edge.lab.report.document import terminal
from edge.lab.report.page import render


def document(found: Comparison, kind: str) -> str:
    return render(kind, comparison_report(found), comparison_json(found))


def comparison(found: Comparison) -> str:
    return terminal(comparison_report(found))


@pytest.mark.parametrize("profile", [make_profile(), make_bare_profile()])
def test_profiles_come_back_from_json(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(profile.to_dict()))
    assert read_profile(path) == profile


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way, *(each for key, inner in items for each in places(inner, (*way, key)))]


SMALL = json.loads(
    json.dumps(make_profile(engines=[make_engine(timeline=make_bare_profile().engines[0].timeline)]).to_dict())
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([each for each in places(SMALL) if each]), JSON, st.booleans())
def test_damaged_profiles_never_crash(
    tmp_path_factory: pytest.TempPathFactory, way: tuple[Any, ...], value: Any, delete: bool
) -> None:
    data = json.loads(json.dumps(SMALL))
    inner = data
    for key in way[:-1]:
        inner = inner[key]
    if delete:
        del inner[way[-1]]
    else:
        inner[way[-1]] = value
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_text(json.dumps(data))
    try:
        found = compare_profiles(read_profile(path), make_profile(), "a", "b")
    except InputError as error:
        said = str(error)
    else:
        said = document(found, ".json") and document(found, ".md") and ""
    assert "\n" not in said


@pytest.mark.parametrize("schema", [0, 2, "1", None, True, 1.0])
def test_another_schema_is_refused_with_one_line(tmp_path: Path, schema: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**make_profile().to_dict(), "schema": schema}))
    with pytest.raises(InputError, match="this edge reads 1"):
        read_profile(path)


def test_no_verdict_without_spread() -> None:
    first = make_engine(load_s=0.0138, ttft=Spread(0.1, 0.1, 0.1, 1), sustained=make_sustained())
    decode = replace(first.decode, joules_per_token=0.09)
    slow = replace(first, load_s=0.0647, ttft=Spread(0.9, 0.9, 0.9, 1), decode=decode, sustained=make_sustained(0.005))
    found = compare_profiles(make_profile(engines=[first]), make_profile(engines=[slow]), "a", "b")
    once = {each.what for each in found.rows if each.sure is None}
    assert once == {
        "memory read", "float32 products", "cpu: first token", "cpu: load", "cpu: peak memory",
        "cpu: energy per token, estimated", "cpu: energy per token there, estimated", "cpu: end of it / its beginning",
    }  # fmt: skip
    lines = {line.split("|")[1].strip(): line for line in document(found, ".md").splitlines() if line.startswith("|")}
    assert "4.69" in lines["cpu: load"]
    assert "not judged" in lines["cpu: load"]
    assert "worse" in lines["cpu: answer at the end of a long run"]
    assert not any("better" in lines[each] or "worse" in lines[each] for each in once)


def test_comparisons_name_disturbances() -> None:
    busy = replace(make_sustained(), windows=[replace(each, others=0.65) for each in make_sustained().windows])
    one = make_profile(engines=[make_engine(others=0.55, sustained=busy), make_engine("onnx", others=0.9)])
    found = compare_profiles(one, make_profile(engines=[make_engine(others=0.3)]), "a", "b")
    assert found.notes == [
        "a: other programs took 55% of the cores while cpu was measured",
        "a: other programs took up to 65% of the cores in the long run of cpu",
        "b: other programs took 30% of the cores while cpu was measured",
    ]
    for text in (comparison(found), *(document(found, kind) for kind in (".md", ".html", ".json"))):
        assert all(each in text for each in found.notes)
    steady = make_profile(engines=[make_engine(sustained=make_sustained())])
    assert compare_profiles(steady, steady, "a", "b").notes == []
