"""Answers by the user's own documents: passages in front of the question, as `edge/documents` finds and packs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from edge.errors import InputError
from edge.model.model import Model
from edge.options import Options
from edge.records import dataclass
from edge.run.report import Cited, Pruned

_ENDS = 16  # rows of a template between the question and the answer
_MOST_ANSWER = 4  # an answer without a limit has this part of the rows


@dataclass(frozen=True)
class Reader:
    """A model that passages are for. rows: of its KV cache, at most its context. evicts: whether its policy makes
    room."""

    model: Model
    options: Options
    rows: int
    evicts: bool


@dataclass(frozen=True)
class Grounded:
    """A question behind the passages that were found for it."""

    text: str
    sources: tuple[Cited, ...]
    pruned: Pruned | None = None


class Grounds(Protocol):
    """An object that finds passages: `edge.Documents`."""

    def ground(self, question: str, reader: Reader, room: int) -> Grounded:
        """The question behind passages, at most `room` tokens."""


def grounded(
    documents: Grounds | Grounded, reader: Reader, prompt: Any, messages: Sequence[Mapping[str, Any]] | None,
    system: str | None, max_tokens: int | None,
) -> tuple[Any, Any, Grounded]:  # fmt: skip
    """The prompt or the messages of a call with their question behind passages, and the passages. A `Grounded` lists
    those that a prompt has already. Raises InputError."""
    if isinstance(documents, Grounded):
        return prompt, messages, documents
    if messages is None:
        found = ground(documents, reader, prompt, system, max_tokens)
        return found.text, None, found
    said = list(messages)
    number = next((at for at in range(len(said) - 1, -1, -1) if said[at].get("role") == "user"), None)
    if number is None:
        raise InputError("documents need a question of the user's")
    others = "\n".join(str(each.get("content")) for at, each in enumerate(said) if at != number)
    held = reader.model.tokenizer.encode(others).size + _ENDS * len(said)
    found = ground(documents, reader, said[number].get("content"), system, max_tokens, held)
    said[number] = {**said[number], "content": found.text}
    return None, said, found


def ground(
    documents: Grounds, reader: Reader, question: object, system: str | None, max_tokens: int | None, held: int = 0
) -> Grounded:
    """The question of a turn behind passages, as many as fit into the KV rows beside the answer. held: rows of earlier
    turns, of which a policy that evicts leaves no more than half. Raises InputError."""
    if not hasattr(documents, "ground"):
        raise InputError(f"documents must be edge.Documents, not {documents!r:.60}")
    if not isinstance(question, str):
        raise InputError(f"a question to documents must be text, not {question!r:.60}")
    rows = reader.rows
    held = min(held, rows // 2) if reader.evicts else held
    answer = rows // _MOST_ANSWER if max_tokens in (None, -1) else min(int(max_tokens or 0), rows // 2)
    return documents.ground(question, reader, max(0, rows - held - answer - reader.model.system_rows(system) - _ENDS))
