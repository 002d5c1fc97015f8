"""Section CHAT of model.edge: the chat template as token ids around the texts of messages (runtime/text/chat.c)."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from edge.apps.c_struct import c_struct, filled
from edge.errors import ModelFormatError, UnsupportedError
from edge.model.chat.chat_template import ChatTemplate
from edge.model.chat.parts import Segment
from edge.model.chat.thinking import Think
from edge.model.model import Model

PARTS = ("first", "system", "after system", "opening", "past", "next")  # in the order of CHAT_FIRST …
# counts: ids of each part, or ABSENT. starts: bit i: no template text precedes the message after part i.
HEADER = c_struct(counts=("<i4", (len(PARTS),)), starts="<u4", reserved="<u4")
ABSENT = -1
_USER, _SYSTEM = "user", "system"

Parts = dict[str, list[int]]


def chat_section(model: Model) -> bytes:
    """The bytes of section CHAT; empty for a model without a chat template, or with one that fails."""
    if model.template is None:
        return b""
    try:
        parts, starts = _render(model, model.template)
    except (ModelFormatError, UnsupportedError):
        return b""
    counts = [len(parts[name]) if name in parts else ABSENT for name in PARTS]
    flags = sum(1 << at for at, name in enumerate(PARTS) if name in starts)
    ids = [token for name in PARTS for token in parts.get(name, ())]
    return filled(HEADER, {"counts": counts, "starts": flags}) + np.array(ids, "<i4").tobytes()


def exported_think(template: ChatTemplate) -> Think:
    """The thinking mode of exported models: off where the template or the family can turn it off, since apps would show
    thoughts as a part of the answer."""
    if template.family is not None:
        with suppress(UnsupportedError):
            template.first_turn(_USER, None, Think(False))
            return Think(False)
    return Think()


def _render(model: Model, template: ChatTemplate) -> tuple[Parts, set[str]]:
    """Token ids of each part, and the parts whose message follows no template text."""
    think = exported_think(template)
    first = _Rendered(model, template.first_turn(_USER, None, think), _USER)
    past = _Rendered(model, template.first_turn(_USER, None, think, answered=True), _USER)
    parts = {"first": first.opened(), "opening": first.ids(1), "past": past.ids(1)}
    starts = {"first"} if first.begins else set()
    with suppress(ModelFormatError, UnsupportedError):  # where the template takes no system prompt
        system = _Rendered(model, template.first_turn(_USER, _SYSTEM, think), _SYSTEM, _USER)
        if system.ids(2) == parts["opening"]:
            parts |= {"system": system.opened(), "after system": system.ids(1)}
            starts |= {"system"} if system.begins else set()
    with suppress(ModelFormatError, UnsupportedError):  # where it drops replies
        follow = _Rendered(model, template.next_turn(_USER, think), _USER)
        if follow.ids(1) == parts["opening"]:
            parts["next"] = follow.ids(0, start=True)
            starts |= {"next"} if follow.begins else set()
    return parts, starts


class _Rendered:
    """The template's own text around the messages `texts`. Raises UnsupportedError if it repeats or reorders them."""

    def __init__(self, model: Model, segments: list[Segment], *texts: str) -> None:
        self._model, self._around = model, [""]
        for segment in segments:
            if segment.trusted:
                self._around[-1] += str(segment.text)
            else:
                self._around.append("")
        if tuple(segment.text for segment in segments if not segment.trusted) != texts:
            raise UnsupportedError("the chat template repeats a text, or has another order")

    @property
    def begins(self) -> bool:
        """Whether the prompt begins with the first message, without template text before it."""
        return not self._around[0]

    def ids(self, at: int, start: bool = False) -> list[int]:
        """Token ids of the template text before message `at`, or after the last message."""
        found: list[int] = self._model.tokenizer.encode(self._around[at], special=True, start=start).tolist()
        return found

    def opened(self) -> list[int]:
        """Token ids before the first message, with the BOS token if the tokenizer adds one."""
        ids, tokenizer = self.ids(0, start=True), self._model.tokenizer
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            return [tokenizer.bos_id, *ids]
        return ids
