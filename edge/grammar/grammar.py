"""The grammar of an answer, as users pass it: a JSON schema, a regular expression, or a grammar in Lark's notation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge.errors import InputError
from edge.records import dataclass
from edge.values import brief

KINDS = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
"""Fields of a Grammar, and their names in messages."""
MOST_TEXT = 1 << 20  # characters of a grammar
MOST_ALIKE = 12  # patterns that one text must match at once: each doubles the states of their product, without limit


@dataclass(frozen=True)
class Grammar:
    """The form of an answer, from its first token to its last; exactly one of the first three fields is set. Thoughts
    before the answer are free.

    json_schema: a JSON schema, as a dict or as JSON text; properties come in the order of the schema. regex: a regular
    expression in Rust's syntax, which the whole answer matches. lark: a grammar in llguidance's variant of Lark, whose
    `start` the answer matches, or in llama.cpp's GBNF, whose `root` it matches. param: the field of a request to a
    server that states it, for errors.

    Raises InputError for anything else. The grammar itself is checked when an answer begins, or by
    `edge.check_grammar`.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    lark: str | None = None
    param: str | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise InputError(f"a grammar is one of {', '.join(KINDS)}, not {' and '.join(given) or 'none of them'}")
        value, name = getattr(self, given[0]), self.name
        if self.json_schema is not None:
            value = _schema_text(value)
            object.__setattr__(self, "json_schema", value)
        if not isinstance(value, str):
            raise InputError(f"the {name} must be text, not {brief(value)}")
        if not value.strip():
            raise InputError(f"the {name} is empty")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InputError(f"the {name} has half of a surrogate pair, which no text has") from None
        if len(value) > MOST_TEXT:
            raise InputError(f"the {name} has {len(value)} characters, and may have at most {MOST_TEXT}")
        alike = _alike(value) if self.lark is not None else 0 if self.regex is not None else _most_alike(value)
        if alike > MOST_ALIKE:
            raise InputError(f"the {name} wants a text to match {alike} patterns at once: at most {MOST_ALIKE} may")

    @classmethod
    def of_choices(cls, texts: object, param: str | None = None) -> Grammar:
        """The grammar of an answer that is one of these texts. Raises InputError."""
        if (
            not isinstance(texts, list | tuple)
            or not texts
            or not all(isinstance(each, str) and each for each in texts)
        ):
            raise InputError(f"choices must be a list of texts, not {brief(texts)}")
        return cls(lark="start: " + " | ".join(json.dumps(each) for each in texts), param=param)

    @property
    def text(self) -> str:
        return str(next(value for kind in KINDS if (value := getattr(self, kind)) is not None))

    @property
    def name(self) -> str:
        """The name of its kind, in messages."""
        return next(name for kind, name in KINDS.items() if getattr(self, kind) is not None)


def read_grammar(*, json_schema: Path | None, lark: Path | None, regex: str | None) -> Grammar | None:
    """Read a grammar from a file, or from a regular expression; None if none is given. Raises InputError."""
    if (json_schema, lark, regex) == (None, None, None):
        return None
    if sum(each is not None for each in (json_schema, lark, regex)) > 1:
        raise InputError("an answer has one form: state --json-schema, --grammar or --regex")
    files = {"json_schema": json_schema, "lark": lark}
    texts = {name: _read(path) for name, path in files.items() if path is not None}
    try:
        return Grammar(**texts, regex=regex)
    except InputError as error:
        raise InputError(": ".join(map(str, [*filter(None, files.values()), error]))) from None


def _read(path: Path) -> str:
    try:
        if path.is_file() and path.stat().st_size > 4 * MOST_TEXT:
            raise InputError(f"{path} is larger than {4 * MOST_TEXT >> 20} MiB: that is no grammar")
        return path.expanduser().read_text(encoding="utf-8-sig")  # Windows' editors write a mark first
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text in UTF-8") from None


_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//.*')


def _alike(lark: str) -> int:
    """An upper bound on the number of operands that `&` joins."""
    return 1 + _LITERAL.sub("", lark).count("&")


def _most_alike(schema: str) -> int:
    """An upper bound on the number of patterns that allOf joins."""
    read, most, referred = json.loads(schema), 0, schema.count('"pattern"')

    def count(part: object) -> int:
        nonlocal most
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        patterns = sum(map(count, inner))
        if isinstance(part, dict):
            patterns += "pattern" in part
            if "$ref" in part:
                patterns = referred
            if "allOf" in part:
                most = max(most, patterns)
        return patterns

    count(read)
    return most


def _schema_text(schema: object) -> str:
    """A schema as JSON text. Raises InputError if it is not a JSON object."""
    try:
        read = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(dict(read), ensure_ascii=False, allow_nan=False) if isinstance(read, Mapping) else None
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the JSON schema is not JSON: {error}") from None
    if text is None:
        raise InputError(f"a JSON schema must be a JSON object, not {brief(read)}")
    return text
