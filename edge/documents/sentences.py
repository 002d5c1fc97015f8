"""Sentences of a text: by their punctuation, but not behind abbreviations, initials and numbers of items."""

from __future__ import annotations

import re
from collections.abc import Callable

Count = Callable[[str], int]  # the tokens of a text

# An end, closing quotes and brackets, blanks, and what may begin a sentence; or an end of Chinese and Japanese.
_END = re.compile(r"(?<=[.!?…])[\"'”’»)\]]*\s+(?=[\"'“‘«¿¡(\[]*[^\Wa-z_])|(?<=[。！？])[”’」』）]*\s*(?=\S)")
_ABBREVIATED = re.compile(
    r"(?:\b(?:e\.g|i\.e|cf|vs|etc|al|approx|no|nr|fig|sec|vol|pp?|ed|eds|mr|mrs|ms|dr|prof|st|jr|sr|inc|ltd|co|bzw|usw|"
    r"z\.\s?b|d\.\s?h|ca|ggf|vgl|bspw|p\.\s?ej|par\s+ex|env|sig|dott)|\b[^\W\d_])\.$",
    re.IGNORECASE,
)
_ENDS_ANYWAY = re.compile(r"\b(?:etc|al|co|inc|ltd|no)\.$", re.IGNORECASE)
_ITEM = re.compile(r"\s*\d{1,3}\.")  # the number of an item of a list
_LOOKS_BACK = 12  # characters before a full stop


def sentences(text: str) -> list[str]:
    """The sentences of a text, in their order; joined they are the text, so that each has the blanks behind it."""
    found, start = list[str](), 0
    for match in _END.finditer(text):
        before = text[max(start, match.start() - _LOOKS_BACK) : match.start()]
        if _ABBREVIATED.search(before) and not _ENDS_ANYWAY.search(before):
            continue
        if _ITEM.fullmatch(text, start, match.start()):
            continue
        found.append(text[start : match.end()])
        start = match.end()
    if text[start:]:
        found.append(text[start:])
    return found
