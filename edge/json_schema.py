"""JSON schemas as grammars need them: without further keys, in one piece, and as the fields of an object.

A schema that does not speak of `additionalProperties` allows any key by its specification. Grammars, ours and those of
other servers, allow the named ones: a small model may add keys up to its limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from edge.errors import InputError

Fields = tuple[dict[str, Any], list[str]]
"""Properties of an object, and the names of the required ones."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name, for values of their own
_INNER = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains", "propertyNames")
_ALTERNATIVES = ("anyOf", "oneOf")
_OTHERWISE = {"anyOf", "oneOf", "allOf", "enum", "$ref", "const"}  # that tell a type, beside `type`
_SPOKEN = {"additionalProperties", "unevaluatedProperties", "minProperties"}  # of keys that are not named
_MOST_VARIANTS = 16
_MOST_STEPS = 300_000
MALFORMED = (TypeError, AttributeError, ValueError, RecursionError)
"""What code raises that reads a schema as if it were well-formed."""


def closed(schema: Any) -> Any:
    """A copy in which objects with `properties` have no other keys, unless their schema speaks of these. Raises
    InputError for a schema that is malformed or too large."""
    try:
        return _Closing(schema).close(schema, alone=True)
    except MALFORMED:
        raise InputError("the JSON schema is malformed") from None


class _Closing:
    """Closes the objects of one schema, its root."""

    def __init__(self, root: Any) -> None:
        self._root, self._budget = root, _Budget()

    def close(
        self, schema: Any, *, alone: bool, counts: Mapping[str, int] | None = None, seen: tuple[str, ...] = ()
    ) -> Any:
        """alone: no other schema holds for the same value, so that this one may forbid the keys that it does not name.
        counts: of the names in all schemas that hold for it. seen: references on the way."""
        self._budget.spend()
        if not isinstance(schema, Mapping):
            return schema
        parts = [*(schema.get("allOf") or ()), *(key for key in _ALTERNATIVES if key in schema)]
        several = len(parts) + ("$ref" in schema) + ("properties" in schema or "required" in schema) > 1
        group = list(self._group(schema, set())) if alone and (several or "properties" in schema) else []
        if counts is None:
            counts = Counter(name for each in group for name in each.get("properties") or ())
        found = dict(schema)
        for key in _NAMED:
            if isinstance(named := schema.get(key), Mapping):
                once = {name for name in named if key != "properties" or counts.get(name, 0) < 2}
                found[key] = {name: self.close(each, alone=name in once) for name, each in named.items()}
        for key in _INNER:
            if isinstance(inner := schema.get(key), list):
                found[key] = [self.close(each, alone=True) for each in inner]
            elif key in schema:
                found[key] = self.close(inner, alone=True)
        more: dict[str, Any] = {"alone": alone and not several, "seen": seen}
        more["counts"] = None if more["alone"] else counts
        for key in ("allOf", *_ALTERNATIVES):
            if isinstance(schema.get(key), list):
                found[key] = [self.close(each, **more) for each in schema[key]]
        reference = schema.get("$ref")
        if isinstance(reference, str) and not more["alone"] and reference not in seen:
            target = resolve(reference, self._root)
            if isinstance(target, Mapping):  # its own place is closed: repeat it, open
                del found["$ref"]
                inlined = self.close(target, alone=False, counts=counts, seen=(*seen, reference))
                found["allOf"] = [*(found.get("allOf") or ()), inlined]
        if group and any("properties" in each for each in group) and not any(_SPOKEN & each.keys() for each in group):
            names = dict.fromkeys(
                (name for each in group for key in ("properties", "required") for name in each.get(key) or ()), True
            )
            found |= {"properties": names | dict(found.get("properties") or {}), "additionalProperties": False}
        return found

    def _group(self, schema: Any, seen: set[str]) -> Iterator[Mapping[str, Any]]:
        """The schemas that hold, or may hold, for the same value as this one, itself included."""
        self._budget.spend()
        if not isinstance(schema, Mapping):
            return
        yield schema
        for key in ("allOf", *_ALTERNATIVES):
            for each in schema.get(key) or ():
                yield from self._group(each, seen)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            yield from self._group(resolve(reference, self._root), seen)


class _Budget:
    """Bounds the work that references multiply."""

    def __init__(self) -> None:
        self._left = _MOST_STEPS

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise InputError("the JSON schema is too large with all that it refers to")


def resolve(reference: str, root: Any) -> Any:
    """The schema that a reference within `root` names; None if there is none."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in filter(None, unquote(reference[1:]).split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, Sequence) and not isinstance(found, str) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def standalone(schema: Any, root: Any) -> Any:
    """A schema from within `root` that holds by itself: what it refers to is among its `$defs`."""
    if not isinstance(schema, Mapping) or not _refers(schema):
        return schema
    return {**_rebased(schema), "$defs": {"root": _rebased(root)}}


def _refers(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return "$ref" in schema or any(map(_refers, schema.values()))
    return isinstance(schema, list) and any(map(_refers, schema))


def _rebased(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_rebased(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _rebased(each) for key, each in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        found["$ref"] = "#/$defs/root" + reference[1:].rstrip("/")
    return found


def variants(schema: Any, root: Any) -> list[Fields]:
    """The objects that a schema describes: one for each of its alternatives. Raises InputError as `closed` does."""
    try:
        return _variants(schema, root, (), _Budget()) or [({}, [])]
    except MALFORMED:
        raise InputError("the JSON schema is malformed") from None


def is_text(schema: Any) -> bool:
    """Whether a value in tags is its text as it stands, rather than JSON."""
    if not isinstance(schema, Mapping):
        return True
    return schema.get("type", "string") == "string" and ("type" in schema or not schema.keys() & _OTHERWISE)


def properties_of(schema: Any) -> dict[str, Any]:
    """All properties that an object may have by a schema."""
    found = dict[str, Any]()
    for properties, _ in variants(schema, schema):
        found = properties | found
    return found


def with_properties(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as templates read them: each function's parameters have `properties`, also if they come by references or
    alternatives."""
    found = list[dict[str, Any]]()
    for tool in tools:
        parameters = tool["function"]["parameters"]
        if "properties" not in parameters:
            parameters = {**parameters, "type": "object", "properties": properties_of(parameters)}
        found.append({**tool, "function": {**tool["function"], "parameters": parameters}})
    return found


def _variants(schema: Any, root: Any, seen: tuple[str, ...], budget: _Budget) -> list[Fields]:
    budget.spend()
    if not isinstance(schema, Mapping) or "object" not in schema.get("type", "object"):
        return []
    found: list[Fields] = [(dict(schema.get("properties") or {}), list(schema.get("required") or ()))]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        found = _both(found, _variants(resolve(reference, root), root, (*seen, reference), budget))
    for each in schema.get("allOf") or ():
        found = _both(found, _variants(each, root, seen, budget))
    for key in _ALTERNATIVES:
        if schema.get(key):
            found = _both(found, [one for each in schema[key] for one in _variants(each, root, seen, budget)])
    return found


def _both(ones: list[Fields], others: list[Fields]) -> list[Fields]:
    """Objects that match one of each. Beyond a number of them, one that has any of their properties."""
    found = [
        ({**one, **{name: {"allOf": [one[name], each]} if name in one else each for name, each in other.items()}},
         list(dict.fromkeys((*needs, *more))))
        for one, needs in ones for other, more in others or [({}, [])]
    ]  # fmt: skip
    if len(found) <= _MOST_VARIANTS:
        return found
    merged = {name: each for properties, _ in found for name, each in properties.items()}
    return [(merged, [name for name in found[0][1] if all(name in needs for _, needs in found)])]
