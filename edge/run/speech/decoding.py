"""From a window that was heard to its tokens, as `decoding.py` and `transcribe.py` of openai-whisper do it: greedily,
and at higher temperatures while the text repeats itself or is improbable."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext

import numpy as np

from edge.records import dataclass
from edge.run.decoding.lanes import common
from edge.run.senses.hearing import Listener
from edge.run.speech.beams import GREEDY, Beams, search
from edge.run.speech.rules import TokenRules
from edge.types import FloatArray, IntArray

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MOST_RATIO = 2.4  # of a text's bytes to those of zlib: more means repetition
LEAST_LOGPROB = -1.0  # per token
NO_SPEECH = 0.6  # probability from which an improbable text counts as none

Pay = Callable[[int], None]
"""Is called before a pass, with the number of tokens that it runs; raises an exception to end the transcript."""


@dataclass(frozen=True)
class Decoded:
    """The text of a window. tokens: without the one that ended it; logprobs: natural logarithms of their
    probabilities. logprob: the mean, with the end. no_speech: probability. ratio: of compression."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    logprob: float
    no_speech: float
    temperature: float
    ratio: float

    @property
    def silent(self) -> bool:
        """Whether the window holds no speech."""
        return self.no_speech > NO_SPEECH and self.logprob <= LEAST_LOGPROB

    @property
    def failed(self) -> bool:
        """Whether a higher temperature may do better."""
        return (self.ratio > MOST_RATIO or self.logprob < LEAST_LOGPROB) and not self.silent


class Decoder:
    """Decodes the window that the listener heard last."""

    def __init__(
        self, listener: Listener, rules: TokenRules, temperatures: Sequence[float] = TEMPERATURES,
        beams: Beams = GREEDY,
    ) -> None:  # fmt: skip
        self._listener, self._rules, self._temperatures, self._beams = listener, rules, temperatures, beams
        self._random = np.random.default_rng(0)

    def detect_language(self, pay: Pay) -> dict[str, float]:
        """The probability of each language, by code."""
        whisper = self._listener.whisper
        self._listener.kv.truncate(0)
        pay(1)
        logits = self._listener.forward(np.array([whisper.sot], np.int32))
        codes, ids = list(whisper.languages), list(whisper.languages.values())
        return dict(zip(codes, np.exp(_log_softmax(logits[ids])).tolist(), strict=True))

    def decode(self, before: Sequence[int], opening: Sequence[int], seed: int, pay: Pay) -> Decoded:
        """before: tokens of the text before, at most half the context. opening: of the transcript, from
        `<|startoftranscript|>` on. seed: of the draws."""
        self._random = np.random.default_rng(seed)
        listener, whisper = self._listener, self._listener.whisper
        if before:
            before = [whisper.prev, *before[-(whisper.context // 2 - 1) :]]
        listener.kv.truncate(0)
        heard = self._run([*before, opening[0]], pay).copy()
        no_speech = float(np.exp(_log_softmax(heard)[whisper.no_speech]))
        if opening[1:]:
            heard = self._run(opening[1:], pay).copy()
        begun = listener.kv.length
        for temperature in self._temperatures:
            found = self._best(heard, begun, temperature, no_speech, pay)
            if not found.failed:
                break
        return found

    def _best(self, heard: FloatArray, begun: int, temperature: float, no_speech: float, pay: Pay) -> Decoded:
        """Of several texts that are searched or drawn. heard: the logits behind the first `begun` tokens."""
        if temperature == 0 and self._beams.size > 1:
            return self._search(heard, begun, no_speech, pay)
        found = list[Decoded]()
        for _ in range(self._beams.best_of if temperature else 1):
            self._listener.kv.truncate(begun)
            found.append(self._sample(heard.copy(), temperature, no_speech, pay))
        lengths = [len(each.tokens) for each in found]
        totals = [(length, each.logprob * (length + 1)) for each, length in zip(found, lengths, strict=True)]
        return found[self._beams.rank(totals)]

    def _search(self, heard: FloatArray, begun: int, no_speech: float, pay: Pay) -> Decoded:
        kv, context, held = self._listener.kv, self._listener.whisper.context, tuple[int, ...]()
        kv.truncate(begun)
        lanes, ran = self._listener.lanes(self._beams.size), dict[tuple[int, ...], FloatArray]()

        def ahead(texts: list[tuple[int, ...]]) -> None:
            ran.clear()
            if lanes and texts[0]:
                pay(len(texts))
                ran.update(zip(texts, lanes.run(texts), strict=True))

        def logprobs_of(text: tuple[int, ...]) -> FloatArray:
            nonlocal held
            if text in ran:
                logits = ran[text].copy()
            elif text:
                same = min(common(text, held), len(text) - 1)  # the last token runs, for its logits
                kv.truncate(begun + same)
                logits, held = self._run(text[same:], pay).copy(), text
            else:
                kv.truncate(begun)
                logits = heard.copy()
            self._rules.apply(logits, list(text))
            return _log_softmax(logits)

        most = min(context // 2, context - begun)
        with closing(lanes) if lanes else nullcontext():
            tokens, logprobs, total = search(self._beams, logprobs_of, self._listener.whisper.eot, most, ahead)
        return self._decoded(tokens, logprobs, total, no_speech, 0.0)

    def _sample(self, logits: FloatArray, temperature: float, no_speech: float, pay: Pay) -> Decoded:
        whisper, tokens, logprobs, ended = self._listener.whisper, list[int](), list[float](), 0.0
        for _ in range(min(whisper.context // 2, whisper.context - self._listener.kv.length)):
            self._rules.apply(logits, tokens)
            token = int(logits.argmax()) if temperature == 0 else self._draw(logits, temperature)
            logprob = float(logits[token] - _log_sum(logits))
            if token == whisper.eot:
                ended = logprob
                break
            tokens.append(token)
            logprobs.append(logprob)
            if self._listener.kv.length == whisper.context:
                break
            logits = self._run([token], pay)
        return self._decoded(tuple(tokens), tuple(logprobs), sum(logprobs) + ended, no_speech, temperature)

    def _decoded(
        self, tokens: tuple[int, ...], logprobs: tuple[float, ...], total: float, no_speech: float, temperature: float
    ) -> Decoded:
        end, tokenizer = self._listener.whisper.eot, self._listener.tokenizer
        text = tokenizer.decode(token for token in tokens if token < end).strip()
        return Decoded(tokens, logprobs, total / (len(tokens) + 1), no_speech, temperature, compression(text))

    def _draw(self, logits: FloatArray, temperature: float) -> int:
        probabilities = np.exp(_log_softmax(logits / np.float32(temperature)).astype(np.float64))
        return int(np.searchsorted(np.cumsum(probabilities), self._random.random() * probabilities.sum()))

    def _run(self, tokens: Sequence[int], pay: Pay) -> FloatArray:
        pay(len(tokens))
        ids: IntArray = np.array(tokens, np.int32)
        return self._listener.forward(ids)


def compression(text: str) -> float:
    """Bytes of a text per byte that zlib needs; 0 for none."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def _log_softmax(logits: FloatArray) -> FloatArray:
    return np.asarray(logits - _log_sum(logits))


def _log_sum(logits: FloatArray) -> np.float32:
    """The logarithm of the sum of their powers."""
    highest = logits.max()
    powers = logits - highest
    found: np.float32 = highest + np.log(np.exp(powers, out=powers).sum())
    return found
