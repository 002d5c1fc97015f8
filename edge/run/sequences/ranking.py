"""The relevance of texts to a query, from 0 to 1: by a reranker's classifier, by the probability of the answer yes, as
Qwen3-Reranker's authors have it, or by the cosine of embeddings.

A decoder's prompts begin alike, up to the text: these tokens run once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np

from edge.backends.base import HiddenEngine
from edge.errors import EngineError, InputError, ModelFormatError, UnsupportedError
from edge.model.model import Model
from edge.model.tensors import find_network
from edge.run.sequences.embedding import embed, pool
from edge.run.sequences.sequence import TokenSequence
from edge.types import FloatArray, IntArray

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
_ANSWERS = ("yes", "no")
_AT_ONCE = 256  # texts whose tokens and vectors are in memory
_LEAST = 8  # tokens of a text that must fit beside the query

Runs = Callable[[IntArray, bool], float]  # the score after these tokens; False: more tokens follow, and there is none


def rank(
    sequence: TokenSequence, model: Model, query: str, texts: Sequence[str], instruction: str | None = None
) -> tuple[FloatArray, int]:
    """The relevance of each text, float32 [texts], and the number of tokens that ran. Arguments and errors are those of
    `Session.rank`."""
    network = find_network(model.spec)
    if not query.strip():
        raise InputError("the query is empty")
    if not all(texts):
        raise InputError("a text to rank is empty: leave it out")
    if instruction is not None and network.encoder:
        raise InputError("--instruction is for rerankers that answer yes or no")
    scores, count = np.empty(len(texts), np.float32), 0
    for start in range(0, len(texts), _AT_ONCE):
        some = texts[start : start + _AT_ONCE]
        if network.ranks and network.encoder:
            found, ran = _by_pairs(sequence, model, query, some)
        elif network.ranks or model.answers_yes:
            found, ran = _by_answers(sequence, model, query, some, instruction or INSTRUCTION)
        else:
            found, ran = _by_cosine(sequence, model, query, some)
        scores[start : start + _AT_ONCE] = found
        count += ran
    if not np.isfinite(scores).all():
        raise EngineError("the model produced NaN: its weights are damaged or overflow")
    return scores, count


def _by_pairs(sequence: TokenSequence, model: Model, query: str, texts: Sequence[str]) -> tuple[FloatArray, int]:
    """A cross-encoder sees the query and a text at once."""
    asked, bos = model.tokenizer.encode(query), model.tokenizer.bos_id
    end, most = model.tokenizer.eos_id, sequence.engine.kv.capacity
    if bos is None or end is None:
        raise ModelFormatError(f"{model.path}: its header names no bos and eos token to put around texts")
    first = np.concatenate([[bos], asked, [end] * model.separators]).astype(np.int32)
    room = _room(most - first.size - 1)
    pairs = [np.concatenate([first, model.tokenizer.encode(text)[:room], [end]]).astype(np.int32) for text in texts]
    types = None
    if find_network(model.spec).token_types > 1:
        types = [(np.arange(pair.size) >= first.size).astype(np.int32) for pair in pairs]
    scores = [model.tail.score(pooled) for pooled in pool(sequence, pairs, None, types)]
    return np.array(scores, np.float32), sum(pair.size for pair in pairs)


def _by_answers(
    sequence: TokenSequence, model: Model, query: str, texts: Sequence[str], instruction: str
) -> tuple[FloatArray, int]:
    """A decoder answers yes or no, or has a classifier in place of the answer."""
    encode, kv = model.tokenizer.encode, sequence.engine.kv
    body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>:"
    begin = np.concatenate([encode(_PROMPT[0], special=True), encode(body, start=False)]).astype(np.int32)
    end = encode(_PROMPT[1], special=True, start=False)
    room = _room(kv.capacity - begin.size - end.size)
    ends = [np.concatenate([encode(f" {text}", start=False)[:room], end]).astype(np.int32) for text in texts]
    run = _classifier(sequence, model) if find_network(model.spec).ranks else _answer(sequence, model)
    shares = not sequence.engine.kv.has_tail
    sequence.reset()
    if shares:
        _run(sequence, run, begin, last=False)
    scores = []
    for tokens in ends:
        sequence.reset(begin.size if shares else 0)
        scores.append(_run(sequence, run, tokens if shares else np.concatenate([begin, tokens]), last=True))
    sequence.reset()
    begun = begin.size * (1 if shares else len(texts))
    return np.array(scores, np.float32), begun + sum(tokens.size for tokens in ends)


def _run(sequence: TokenSequence, run: Runs, tokens: IntArray, *, last: bool) -> float:
    score, chunk = 0.0, sequence.plan.config.chunk
    for start in range(0, tokens.size, chunk):
        score = run(tokens[start : start + chunk], last and start + chunk >= tokens.size)
    return score


def _answer(sequence: TokenSequence, model: Model) -> Runs:
    yes, no = (int(model.tokenizer.encode(answer, start=False)[0]) for answer in _ANSWERS)

    def run(tokens: IntArray, last: bool) -> float:
        logits = sequence.forward_prompt(tokens, upcoming=tokens.size)
        return float(1 / (1 + np.exp(np.float64(logits[no]) - np.float64(logits[yes])))) if last else 0.0

    return run


def _classifier(sequence: TokenSequence, model: Model) -> Runs:
    engine = cast(HiddenEngine, sequence.engine)
    if not engine.capabilities.hidden:
        name = sequence.plan.backend
        raise UnsupportedError(f"the {name} engine hands out no hidden states to rank by: use --backend=cpu")

    def run(tokens: IntArray, last: bool) -> float:
        states = sequence.hidden(engine, tokens)
        return model.tail.score(states[-1].astype(np.float64)) if last else 0.0

    return run


def _by_cosine(sequence: TokenSequence, model: Model, query: str, texts: Sequence[str]) -> tuple[FloatArray, int]:
    names = ("query", "document")
    prompts = [name if name in model.prompts else None for name in names]
    both = [model.encode_text(model.prompted(query, prompts[0]), embedded=True)]
    both += [model.encode_text(model.prompted(text, prompts[1]), embedded=True) for text in texts]
    vectors = embed(sequence, model, both, None, normalize=True, truncate=True)
    most = sequence.engine.kv.capacity
    return np.clip(vectors[1:] @ vectors[0], 0, 1), sum(min(tokens.size, most) for tokens in both)


def _room(rows: int) -> int:
    """The most tokens of a text. Raises InputError if the query leaves none."""
    if rows < _LEAST:
        raise InputError("the query leaves no room for a text: shorten it, or use a larger --max-kv-size")
    return rows


def ranked(scores: FloatArray, top: int | None = None) -> Iterator[tuple[int, float]]:
    """Yield the numbers of texts and their relevance, the most relevant first. top: at most this many."""
    order = np.argsort(-scores, kind="stable")[:top]
    yield from ((int(number), float(scores[number])) for number in order)
