"""Words that say something of a text's subject, without their endings."""

from __future__ import annotations

import re

# Words of questions that say nothing of their subject: in a small index even these are rare.
_COMMON = """
a about an and are as at be been by can could did do does for from had has have how i if in into is it its me my of on
one or our shall should so some such than that the their them then there these they this those to us was we were what
when where which who whom whose why will with would you your
"""
_UNSAYING = frozenset(_COMMON.split())
_ENDINGS = ("ing", "ion", "ed", "es", "er", "ly", "s", "e")
_SHORTEST = 3  # letters of a stem


def said_words(text: str) -> list[str]:
    """The words of a text in lowercase, but for those that say nothing of its subject; all, if it has no others."""
    words = re.findall(r"\w+", text.lower())
    return [each for each in words if each not in _UNSAYING] or words


def stem(word: str) -> str:
    """A word without its ending, by which an English word and its forms are the same."""
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _SHORTEST:
            return word[: -len(ending)]
    return word
