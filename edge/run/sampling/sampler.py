"""From logits to the next token: small pure functions over a logits array, composed into one sampler.

The order is llama.cpp's: biases, penalties, DRY, top-k, top-p, min-p, XTC, temperature. A caller's processor comes
before all of them; a grammar's mask comes after the penalties, which do not affect it. The largest logits are found by
blocks, so that drawing from 49k or 262k logits costs little more than reading them.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edge.errors import NOT_FINITE, EngineError, InputError, UnsupportedError
from edge.sampling import SamplingParams
from edge.types import AnyArray, FloatArray, IntArray

if TYPE_CHECKING:
    from edge.run.sampling.constraint import Constrained

Processor = Callable[[IntArray, FloatArray], FloatArray | None]
"""Takes the answer's tokens so far, int32 [n], and the next logits, float32 [vocab]; changes the logits in place, or
returns new ones."""

PENALTY_WINDOW = 64  # recent tokens that penalties apply to, as in llama.cpp
COLDEST = 1e-30  # the lowest temperature: division by less overflows
_BLOCK = 64  # logits per block in top_k
_FEW = 256  # tokens sorted without top-k, if top-p and min-p keep fewer


class Sampler:
    """Logits float32 [vocab] -> token id. Remembers drawn tokens, for penalties, and writes bans and penalties into the
    given logits.

    banned: tokens that are never drawn: those that the model's file suppresses, the end of turn under --ignore-eos.
    piece: returns a token's bytes, in which DRY looks for sequence breakers. ends: end tokens, not drawn before
    `min_tokens` others.
    """

    def __init__(
        self, params: SamplingParams, banned: Iterable[int] = (), *, piece: Callable[[int], bytes] = lambda _: b"",
        processor: Processor | None = None, ends: Iterable[int] = (), whole: bool = False,
    ) -> None:  # fmt: skip
        """whole: whether the caller reads the logits, too, and needs all of them."""
        self._held = frozenset(ends) - frozenset(banned) if params.min_tokens else frozenset[int]()
        self.banned: IntArray = np.fromiter(sorted(self._held.union(banned)), dtype=np.int32)
        self._params, self._penalizes = params, params.penalizes
        self._recent: deque[int] = deque(maxlen=PENALTY_WINDOW)
        self._rng = np.random.default_rng(params.seed) if params.temperature > 0 else None
        self.constrained: Constrained | None = None  # the grammar that the next token must match
        self.look: Callable[[FloatArray], None] | None = None  # called with the model's own logits
        self._processor, self._piece, self._whole = processor, piece, whole
        self._biased = np.array([token for token, _ in params.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._answer = array("i") if processor is not None or params.dry_multiplier else None

    @property
    def greedy(self) -> bool:
        """Whether the token is always the likeliest that is not banned."""
        return self._rng is None and not self._reads_all

    @property
    def _reads_all(self) -> bool:
        """Whether the choice needs all logits, rather than the largest ones."""
        hooked = self._whole or self.constrained is not None or self.look is not None or self._answer is not None
        return hooked or self._penalizes or self._biased.size > 0

    @property
    def candidates(self) -> int:
        """The number of largest logits from which `draw_from` draws as if from all; 0 if it needs all."""
        count = 1 if self._rng is None else self._params.top_k
        return count + self.banned.size if count and not self._reads_all else 0

    def ban(self, token: int) -> None:
        """Never draw this token from here on."""
        if token not in self.banned:
            self.banned = np.append(self.banned, np.int32(token))

    def count(self, drawn: int) -> None:
        """Set the length of the answer in tokens: from `min_tokens` on, it may end."""
        if self._held and drawn >= self._params.min_tokens:
            self.banned = self.banned[~np.isin(self.banned, list(self._held))]
            self._held = frozenset()

    def most_alike(self, drawn: int) -> int | None:
        """The number of tokens after `drawn` that may not end the answer; None: there is no such limit."""
        return self._params.min_tokens - drawn if self._held else None

    def follow(self, tokens: Iterable[int]) -> None:
        """Continue the answer with tokens that were not drawn."""
        if self._answer is not None:
            self._answer.extend(tokens)

    def __call__(self, logits: FloatArray) -> int:
        if self.look is not None:
            self.look(logits)
        if self._processor is not None:
            logits = self._process(logits)
        if self._biased.size:
            logits[self._biased] += self._biases
        if self.banned.size:
            logits[self.banned] = -np.inf
        if self._recent:
            tokens, counts = np.unique(np.fromiter(self._recent, np.int64), return_counts=True)
            penalize(logits, tokens, self._params.repeat_penalty)
            subtract(logits, tokens, counts, self._params.presence_penalty, self._params.frequency_penalty)
        if self._params.dry_multiplier and self._answer:
            recent = self._answer[-self._params.dry_last_n or len(self._answer) :]
            dry(logits, recent, self._params, self._breaks)
        if self.constrained is not None:
            self._constrain(self.constrained, logits)
        token = greedy(logits) if self._rng is None else draw(logits, self._params, self._rng)
        if self.constrained is not None:
            token = self.constrained.within(token)
        if self._penalizes:
            self._recent.append(token)
        if self._answer is not None:
            self._answer.append(token)
        return token

    def _constrain(self, constrained: Constrained, logits: FloatArray) -> None:
        """Set the logits of tokens that the grammar forbids to −∞. Greedy sampling skips this if the likeliest token is
        allowed. Raises UnsupportedError if no allowed token may be drawn."""
        if self._rng is None:
            likeliest = int(logits.argmax())
            if logits[likeliest] > -np.inf and constrained.allows(likeliest):
                return
        constrained.mask(logits)
        if logits.max() == -np.inf:  # since NaN is no reason to be silent, this is not `not isfinite`
            raise UnsupportedError(
                "the grammar allows only tokens that are not drawn: are --ignore-eos or --min-tokens in use?"
            )

    def _process(self, logits: FloatArray) -> FloatArray:
        """Apply the caller's processor. Raises InputError if it returns anything but logits or None."""
        assert self._processor is not None
        answer = np.array(self._answer, np.int32)
        was_finite = not math.isnan(logits.max())
        found = self._processor(answer, logits)
        if found is None:  # it wrote into them
            found = logits
        if not isinstance(found, np.ndarray) or found.shape != logits.shape or found.dtype.kind != "f":
            raise InputError(f"logits_processor must return logits, float32 [{logits.size}], or None")
        if was_finite and np.isnan(found.max()):
            raise InputError("logits_processor made logits that are NaN")
        return found.astype(np.float32, copy=False)

    def _breaks(self, token: int) -> bool:
        piece = self._piece(token)
        return any(each in piece for each in DRY_BREAKERS)

    def draw_from(self, tokens: IntArray, logits: FloatArray) -> int:
        """Draw from the `candidates` largest logits (or all) as if from all: token and generator state are the same.
        logits: float32 [n], largest first, NaN before all others, equal ones by token id."""
        if self.banned.size:
            logits = np.where(np.isin(tokens, self.banned), np.float32(-np.inf), logits)
            order = np.lexsort((tokens, -logits))
            tokens, logits = tokens[order], logits[order]
        if self._rng is None:
            return int(tokens[greedy(logits)])
        _check_finite(logits)
        count = self._params.top_k
        return _draw_sorted(tokens[:count], logits[:count], self._params, self._rng)


def greedy(logits: FloatArray) -> int:
    """The most likely token. Raises EngineError if the model produced NaN."""
    token = int(logits.argmax())
    if math.isnan(logits[token]):  # argmax stops at the first NaN
        raise EngineError(NOT_FINITE)
    return token


def draw(logits: FloatArray, params: SamplingParams, rng: np.random.Generator) -> int:
    """One random token: top-k, then top-p, min-p, XTC and temperature. Raises EngineError if the model produced NaN."""
    _check_finite(logits)
    if params.top_k:
        tokens = top_k(logits, params.top_k)
        return _draw_sorted(tokens, logits[tokens], params, rng)
    possible = np.flatnonzero(logits > -np.inf).astype(np.int32)
    if possible.size > logits.size // 2:
        possible = np.arange(logits.size, dtype=np.int32)
    else:  # a grammar leaves few
        logits = logits[possible]
    if params.top_p < 1 or params.min_p > 0:
        tokens = _cut_all(logits, params)
        possible, logits = possible[tokens], logits[tokens]
    return _choose(possible, logits.astype(np.float64), params, rng)


def _check_finite(logits: FloatArray) -> None:
    if not math.isfinite(float(logits.max())):  # NaN wins every max
        raise EngineError(NOT_FINITE)


def _cut_all(logits: FloatArray, params: SamplingParams) -> IntArray:
    """The tokens that pass top-p and min-p, likeliest first. Sorts all only if the likeliest few do not suffice."""
    largest, total, count = np.float64(logits.max()), 1.0, _FEW
    if params.top_p < 1:
        total = np.exp(logits.astype(np.float64) - largest).sum()
    while True:
        tokens = top_k(logits, count)
        keep = _cut(np.exp(logits[tokens].astype(np.float64) - largest) / total, params)
        if keep < tokens.size or tokens.size == logits.size:
            return tokens[:keep]
        count = logits.size


def _draw_sorted(tokens: IntArray, logits: FloatArray, params: SamplingParams, rng: np.random.Generator) -> int:
    """Draw one of these tokens, which are sorted, likeliest first."""
    kept = logits.astype(np.float64)
    keep = _cut(softmax(kept), params)
    return _choose(tokens[:keep], kept[:keep], params, rng)


def _cut(probabilities: AnyArray, params: SamplingParams) -> int:
    """The number of sorted probabilities that pass top-p and min-p."""
    return max(1, min(top_p(probabilities, params.top_p), min_p(probabilities, params.min_p)))


def _choose(tokens: IntArray, logits: AnyArray, params: SamplingParams, rng: np.random.Generator) -> int:
    if params.xtc_probability and params.xtc_threshold <= 0.5 and rng.random() < params.xtc_probability:
        kept = xtc(softmax(logits), params.xtc_threshold)
        tokens, logits = tokens[kept], logits[kept]
    scaled = (logits - logits.max()) / max(params.temperature, COLDEST)
    return int(tokens[rng.choice(tokens.size, p=softmax(scaled))])


def top_k(logits: FloatArray, k: int) -> IntArray:
    """Ids of the k largest logits, largest first.

    The k-th largest of the blocks' maxima is a lower bound for the k-th largest logit, so only logits that reach it
    have to be sorted.
    """
    blocks = logits.size // _BLOCK
    if k < blocks:
        maxima = logits[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        candidates = np.flatnonzero(logits >= np.partition(maxima, blocks - k)[blocks - k])
    else:
        candidates = np.arange(logits.size)
    order = np.argsort(-logits[candidates], kind="stable")[:k]
    return candidates[order].astype(np.int32)


def top_p(probabilities: AnyArray, p: float) -> int:
    """The number of sorted probabilities whose sum is at least p."""
    if p >= 1:
        return int(probabilities.size)
    return int(np.searchsorted(np.cumsum(probabilities), p)) + 1


def min_p(probabilities: AnyArray, p: float) -> int:
    """The number of sorted probabilities that are at least p times the largest."""
    return int(np.count_nonzero(probabilities >= p * probabilities[0]))


def xtc(probabilities: AnyArray, threshold: float) -> npt.NDArray[np.bool_]:
    """The tokens to keep, bool [n]: excludes all tokens of at least the threshold's probability except the least likely
    of them ("Exclude Top Choices", text-generation-webui #6335). Forbidden tokens, of probability 0, do not count."""
    excluded: npt.NDArray[np.bool_] = (probabilities >= threshold) & (probabilities > 0)
    likely = np.flatnonzero(excluded)
    if likely.size:
        excluded[likely[probabilities[likely].argmin()]] = False
    return ~excluded


DRY_BREAKERS = (b"\n", b":", b'"', b"*")  # text that ends a repetition, as in llama.cpp
LARGEST_EXPONENT = 88.0  # natural logarithm of the largest float32
LARGEST_PENALTY = 1e30  # subtracted from any logit it is still finite


def dry(logits: FloatArray, recent: array[int], params: SamplingParams, breaks: Callable[[int], bool]) -> None:
    """Penalize tokens, in place, that would continue a repetition in `recent`, by multiplier ·
    base^(length − allowed length) ("Don't Repeat Yourself", text-generation-webui #5677). breaks: whether a token is a
    sequence breaker, which no repetition spans."""
    allowed, tokens = params.dry_allowed_length, np.array(recent, np.int32)
    limit = next((back for back, token in enumerate(reversed(recent)) if breaks(token)), len(recent))
    if len(recent) <= allowed or limit < allowed:
        return
    longest: dict[int, int] = {}
    for end in np.flatnonzero(tokens[:-1] == tokens[-1]).tolist():
        most = min(end + 1, limit)
        differ = np.flatnonzero(tokens[end + 1 - most : end + 1] != tokens[tokens.size - most :])
        length = most if not differ.size else most - 1 - int(differ[-1])
        following = int(tokens[end + 1])
        longest[following] = max(length, longest.get(following, 0))
    base = math.log(params.dry_base)
    for token, length in longest.items():
        if length >= allowed and not breaks(token):
            exponent = min((length - allowed) * base, LARGEST_EXPONENT)
            logits[token] -= np.float32(min(params.dry_multiplier * math.exp(exponent), LARGEST_PENALTY))


def penalize(logits: FloatArray, tokens: AnyArray, penalty: float) -> None:
    """Make tokens less likely, in place (CTRL, arXiv:1909.05858)."""
    found = logits[tokens]
    logits[tokens] = np.where(found > 0, found / penalty, found * penalty)


def subtract(logits: FloatArray, tokens: AnyArray, counts: AnyArray, presence: float, frequency: float) -> None:
    """Make tokens less likely, in place, by the counts of their draws: the penalties of OpenAI's API."""
    logits[tokens] -= counts.astype(np.float32) * np.float32(frequency) + np.float32(presence)


def softmax(x: AnyArray) -> AnyArray:
    powers = np.exp(x - x.max())
    return np.asarray(powers / powers.sum())
