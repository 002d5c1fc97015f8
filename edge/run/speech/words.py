"""When each word was said: the path of greatest cross attention through a window, as `timing.py` of openai-whisper
finds it, by dynamic time warping."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edge.model.tokens.tokenizer import TokenizerLike
from edge.records import dataclass
from edge.run.senses.hearing import Listener
from edge.types import FloatArray, IntArray

_WIDTH = 7  # positions over which the median is taken
_PER_SECOND = 50  # positions of the encoder
_NO_SPACES = ("zh", "ja", "th", "lo", "my", "yue")  # languages whose words no spaces part
_OPENING = "\"'“¿([{-"  # punctuation that belongs to the next word
_CLOSING = "\"'.。,，!！?？:：”)]}、"  # and to the one before
_ENDS = ".。!！?？"  # of sentences
_LONGEST_MEDIAN_S = 0.7


@dataclass(frozen=True)
class Word:
    """start, end: seconds in the sound. probability: the mean of its tokens'. tokens: their number."""

    word: str
    start: float
    end: float
    probability: float
    tokens: int = 0


def align(
    listener: Listener, opening: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float], frames: int,
    language: str,
) -> list[Word]:  # fmt: skip
    """The words of a window, with times from its beginning. opening: tokens before the text, without timestamps.
    tokens: of the text, with their log-probabilities. frames: of the window, those with sound."""
    whisper = listener.whisper
    if not tokens:
        return []
    whole: IntArray = np.array([*opening, whisper.no_timestamps, *tokens, whisper.eot], np.int32)
    paid = listener.align(whole)[:, :, : max(1, frames // 2)]
    cost = np.zeros(paid.shape[1:], np.float32)
    for head in paid:  # one at a time: a copy of all takes more than a window does
        head = head / head.sum(axis=-1, keepdims=True)
        spread = head.std(axis=0, keepdims=True)
        cost -= _median((head - head.mean(axis=0, keepdims=True)) / np.where(spread == 0, 1, spread))
    rows, columns = warp(cost[len(opening) : -1] / np.float32(len(paid)))
    starts = columns[np.concatenate([[True], np.diff(rows) > 0])] / _PER_SECOND  # by token, and of the end
    pieces = split_words(listener.tokenizer, tokens, language)
    bounds = np.cumsum([0, *(len(each) for _, each in pieces)])
    words = [
        Word(
            text,
            float(starts[first]),
            float(starts[last]),
            float(np.exp(logprobs[first:last]).mean()),
            int(last - first),
        )
        for (text, _), first, last in zip(pieces, bounds[:-1], bounds[1:], strict=True)
    ]
    return _merge_punctuation(_without_pauses(words))


def warp(cost: FloatArray) -> tuple[IntArray, IntArray]:
    """The cheapest path from the first to the last cell of a matrix, [rows, columns]: rows and columns of its cells.
    A step goes down, right or both; of equal ones it comes from the left first, then from above."""
    rows, columns = cost.shape
    moves = np.zeros((rows + columns - 1, rows), np.int8)  # by diagonal and row: 0 both, 1 down, 2 right
    skewed = np.full((rows + columns - 1, rows), np.inf, np.float32)
    for row in range(rows):
        skewed[row : row + columns, row] = cost[row]
    # Row 0 of these stands for what lies above the matrix.
    before, last = np.full(rows + 1, np.inf, np.float32), np.full(rows + 1, np.inf, np.float32)
    before[0] = 0.0
    for number, costs in enumerate(skewed):
        both, down, right = before[:-1], last[:-1], last[1:]
        chosen = np.where((both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2))
        moves[number] = chosen
        best = np.where(chosen == 0, both, np.where(chosen == 1, down, right))
        before, last = last, np.concatenate([[np.float32(np.inf)], costs + best])
        if number == 0:
            before = before.copy()
            before[0] = np.inf
    row, column, path = rows - 1, columns - 1, []
    while row >= 0 and column >= 0:
        path.append((row, column))
        move = 2 if row == 0 else 1 if column == 0 else moves[row + column, row]
        row, column = row - (move != 2), column - (move != 1)
    found = np.array(path[::-1], np.int32)
    return found[:, 0], found[:, 1]


def split_words(tokenizer: TokenizerLike, tokens: Sequence[int], language: str) -> list[tuple[str, list[int]]]:
    """The words of a text with their tokens: parted by spaces and punctuation, or at each character in languages that
    have no spaces."""
    found = list[tuple[str, list[int]]]()
    for text, held in _characters(tokenizer, tokens):
        begins = text.startswith(" ") or text.strip() in string.punctuation or not found
        if begins or language in _NO_SPACES:
            found.append((text, held))
        else:
            found[-1] = (found[-1][0] + text, found[-1][1] + held)
    return found


def _characters(tokenizer: TokenizerLike, tokens: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Tokens that end in the middle of a character, with those that complete it."""
    found, held, decoder = list[tuple[str, list[int]]](), list[int](), tokenizer.stream_decoder()
    for token in tokens:
        held.append(token)
        if text := decoder.decode(tokenizer.piece(token)):
            found.append((text, held))
            held = []
    if held:
        found.append((decoder.decode(b"", final=True), held))
    return found


def _median(paid: FloatArray) -> FloatArray:
    """Medians of neighbouring positions, [tokens, positions]; reflected at both ends."""
    reach = _WIDTH // 2
    if paid.shape[-1] <= reach:
        return paid
    around = np.pad(paid, [(0, 0), (reach, reach)], mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(around, _WIDTH, axis=-1)
    return np.asarray(np.partition(windows, reach, axis=-1)[..., reach])


def _without_pauses(words: list[Word]) -> list[Word]:
    """A word at the end or the beginning of a sentence takes at most two medians: the rest of its time is a pause."""
    _, most = typical(words)
    found = list(words)
    for place in range(1, len(found)):
        word = found[place]
        if most and word.end - word.start > most:
            if word.word.strip() and word.word.strip() in _ENDS:
                found[place] = replace(word, end=word.start + most)
            elif (before := found[place - 1].word.strip()) and before in _ENDS:
                found[place] = replace(word, start=word.end - most)
    return found


def typical(words: Sequence[Word]) -> tuple[float, float]:
    """The median of words' lengths, at most 0.7 s, and twice that: what a word may take."""
    lengths = [word.end - word.start for word in words if word.end > word.start]
    median = min(_LONGEST_MEDIAN_S, float(np.median(lengths))) if lengths else 0.0
    return median, 2 * median


def _merge_punctuation(words: list[Word]) -> list[Word]:
    """Words with the punctuation before and behind them."""
    found = list[Word]()
    for word in reversed(words):
        if found and word.word.startswith(" ") and word.word.strip() and word.word.strip() in _OPENING:
            following = found[-1]
            text, tokens = word.word + following.word, word.tokens + following.tokens
            found[-1] = replace(following, word=text, tokens=tokens)
        else:
            found.append(word)
    merged = list[Word]()
    for word in reversed(found):
        if merged and word.word and word.word in _CLOSING and not merged[-1].word.endswith(" "):
            before = merged[-1]
            merged[-1] = replace(before, word=before.word + word.word, tokens=before.tokens + word.tokens)
        else:
            merged.append(word)
    return merged
