"""Which tokens may come next in a transcript: the rules of `decoding.py` in openai-whisper."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.model.tokens.tokenizer import TokenizerLike
from edge.model.whisper import Whisper
from edge.types import FloatArray

STEP_S = 0.02  # between two timestamps
LATEST_FIRST_S = 1.0  # of a window's first timestamp
_CONTROLS = ("<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>",
             "<|nospeech|>", "<|nocaptions|>")  # fmt: skip
_NOTES = "♩♪♫♬♭♮♯"
_SYMBOLS = (
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    "<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))", "[[", "]]", "{{", "}}",
    "♪♪", "♪♪♪",
)  # fmt: skip


class TokenRules:
    """Forbids tokens by setting their logits to -∞. timestamps: whether the transcript has them."""

    def __init__(self, whisper: Whisper, tokenizer: TokenizerLike, *, timestamps: bool = True) -> None:
        special = tokenizer.special_tokens()
        controls = [special[name][0] for name in _CONTROLS if name in special]
        never = {*controls, *unspoken(tokenizer), whisper.no_timestamps}
        if not timestamps:
            never.update(range(whisper.first_timestamp, whisper.vocab))
        self.never = np.array(sorted(never))
        self.blank = np.array([*tokenizer.encode(" ", start=False), whisper.eot])
        self._end, self._first, self._timestamps = whisper.eot, whisper.first_timestamp, timestamps

    def apply(self, logits: FloatArray, sampled: Sequence[int]) -> None:
        """logits: float32 [vocab], changed in place. sampled: the tokens of the transcript so far."""
        logits[self.never] = -np.inf
        if not sampled:
            logits[self.blank] = -np.inf
        if self._timestamps:
            self._apply_timestamps(logits, sampled)

    def _apply_timestamps(self, logits: FloatArray, sampled: Sequence[int]) -> None:
        """Timestamps come in pairs, one at the end of a text and one at the beginning of the next, and never fall."""
        first = self._first
        if not sampled:
            logits[:first] = -np.inf
            logits[first + round(LATEST_FIRST_S / STEP_S) + 1 :] = -np.inf
        else:
            ended = sampled[-1] >= first
            paired = len(sampled) < 2 or sampled[-2] >= first
            if ended and paired:
                logits[first:] = -np.inf  # text comes
            elif ended:
                logits[: self._end] = -np.inf  # a second one, or the end
            times = [token for token in sampled if token >= first]
            if times:  # the second of a pair may equal the first; others rise, so that no segment is empty
                logits[first : times[-1] + (0 if ended and not paired else 1)] = -np.inf
        text, times_ahead = logits[:first].max(), logits[first:]
        highest = times_ahead.max(initial=-np.inf)
        if highest > -np.inf and highest + np.log(np.exp(times_ahead - highest).sum()) > text:
            logits[:first] = -np.inf  # all timestamps together are likelier than the likeliest text


def unspoken(tokenizer: TokenizerLike) -> set[int]:
    """Tokens of symbols that are not spoken, such as brackets and notes, with which annotations begin."""
    found = {int(tokenizer.encode(text, start=False)[0]) for text in (" -", " '")}
    for symbol in (*_SYMBOLS, *_NOTES):
        for text in (symbol, " " + symbol):
            tokens = tokenizer.encode(text, start=False)
            if len(tokens) == 1 or symbol in _NOTES:
                found.add(int(tokens[0]))
    return found
