"""Make the golden models: tiny random ones, and what transformers answers for them.

The tests compare our engines with these files, so that they need neither torch nor transformers.
Run it through `make golden` (it needs torch, transformers, gguf and sentencepiece), then `tokens.py`.
Weights come from seeded NumPy generators: a rerun with the same versions gives the same bytes.

It writes, beside itself or into the folder it is given,

    *.gguf          a model in float32, with a byte-level tokenizer and a ChatML template
    *.npz           tokens [64], and logits after them: see `answers` for those of `shapes`, which every test of an
                    engine runs through, `family_answers` for those in families.py, one for each formula
    spm.gguf        a model whose point is its SentencePiece vocabulary
    tokenizer.json  the texts of `torture.py` with SentencePiece's ids; `tokens.py` adds llama.cpp's
"""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import sentencepiece
import torch
import transformers as hf
from families import LLAMA3, WINDOW, configurations, small
from numpy.typing import NDArray
from torture import TEXTS
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from write import (
    CONTROL,
    COUNTING_FROM_1,
    architecture_of,
    byte_level,
    bytes_vocabulary,
    run,
    sentencepiece_bpe,
    write_gguf,
)

Array = NDArray[Any]

TOKENS, LAST = 64, 16
CHUNK, CAPACITY, SINKS = 8, 32, 4  # streaming: tokens per step, rows in the cache, rows never evicted
PROMPT, AFTER = 40, 4  # keeping rows: tokens before and after the eviction
KEEP_ROWS = [0, 1, 2, 3, 7, 8, 12, 15, 16, 17, 21, 26, 30, 33, 34, 38, 39]

GAIN, HEAD_GAIN = 1.2, 3.0  # how much a random matrix stretches its input: logits spread by about 3
BIAS_SPREAD = 0.5
NORM_SPREAD = 0.2  # norm weights differ from 1, or forgetting them would go unnoticed
LOGIT_STEP = 2.0**-13  # logits are rounded to 1.2e-4, which zips a fifth smaller; ten times that is a failure


def shapes() -> dict[str, PreTrainedConfig]:
    """With one layer, a row of the cache depends on its own token and position alone, so an evicted cache must equal a
    fresh run over the tokens that stayed. And 4 heads of 16 are not 32."""
    llama = partial(small, hf.LlamaConfig, head_dim=16)
    return {
        "llama-gqa-tied": llama(hidden=64, ffn=96),
        "llama-gqa-untied": llama(layers=3, hidden=96, heads=6, ffn=64, theta=1e5, tie_word_embeddings=False),
        "llama-one-layer": llama(layers=1, kv_heads=4, ffn=64),
        "llama-rope-scaled": llama(hidden=64, ffn=32, rope=LLAMA3),
    }


def main(out: Path) -> None:
    for seed, (name, config) in enumerate(shapes().items(), start=1):
        model = random_model(config, seed)
        write_gguf(out / f"{name}.gguf", model, byte_level)
        np.savez_compressed(out / f"{name}.npz", **answers(model, random_tokens(seed)))
    for seed, (name, config) in enumerate(configurations().items(), start=21):
        model = random_model(config, seed)
        write_gguf(out / f"{name}.gguf", model, byte_level)
        np.savez_compressed(out / f"{name}.npz", **family_answers(model, seed))

    pieces = train_sentencepiece()
    llama = small(hf.LlamaConfig, layers=1, heads=2, kv_heads=1, ffn=32, head_dim=16, vocab_size=pieces.GetPieceSize())
    write_gguf(out / "spm.gguf", random_model(llama, 9), sentencepiece_bpe(pieces))
    cases = [{"text": text, "spm": pieces.EncodeAsIds(text)} for text in TEXTS]
    (out / "tokenizer.json").write_text(json.dumps(cases), encoding="utf-8")


def random_tokens(seed: int) -> Array:
    first = len(CONTROL)  # control tokens would not occur in the middle of a text
    return np.random.default_rng(100 + seed).integers(first, len(bytes_vocabulary()), TOKENS, dtype=np.int32)


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """With weights wide enough that its attention and its logits are not flat."""
    return fill(hf.AutoModelForCausalLM.from_config(config).eval(), seed)


def fill(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Draw all weights anew."""
    random = np.random.default_rng(seed)
    for name, weight in model.named_parameters():
        drawn = random.standard_normal(weight.shape)
        if name.endswith(".bias"):
            drawn *= BIAS_SPREAD
        elif weight.ndim == 1:  # a norm; Gemma's count from 1
            drawn = (0 if architecture_of(model.config) in COUNTING_FROM_1 else 1) + NORM_SPREAD * drawn
        elif name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):  # GPT-2 has them transposed
            drawn *= GAIN / np.sqrt(weight.shape[0])
        else:
            gain = HEAD_GAIN if any(part in name for part in ("embed_tokens", "lm_head", "wte", "wpe")) else GAIN
            drawn *= gain / np.sqrt(weight.shape[-1])
        weight.copy_(torch.from_numpy(drawn))
    return model


def answers(model: PreTrainedModel, tokens: Array) -> dict[str, Array]:
    """The arrays of one golden file; all logits are [tokens, vocab], after each token.

    tokens         int32, random
    logits         all tokens at once
    stream_logits  in chunks, in a cache that evicts, positions counted in the cache (StreamingLLM)
    gaps_logits    the same, but every token keeps the position that it has in the text
    keep_rows      int32, the rows kept out of the first 40
    keep_logits    the 4 tokens after those 40, at their own positions, seeing these rows alone
    """
    cache = DynamicCache(config=model.config)
    forward(model, cache, tokens[:PROMPT], position=0)
    keep(cache, KEEP_ROWS)
    keep_logits = forward(model, cache, tokens[PROMPT : PROMPT + AFTER], position=PROMPT)
    logits = {
        "logits": forward(model, DynamicCache(config=model.config), tokens, position=0),
        "stream_logits": stream(model, tokens, in_cache=True),
        "gaps_logits": stream(model, tokens, in_cache=False),
        "keep_logits": keep_logits,
    }
    found = {name: rounded(each) for name, each in logits.items()}
    return {"tokens": tokens, "keep_rows": np.array(KEEP_ROWS, np.int32), **found}


def family_answers(model: PreTrainedModel, seed: int) -> dict[str, Array]:
    """The arrays of one golden file of an architecture other than plain Llama.

    tokens         int32 [64], random
    logits         [16, vocab], after each of the last 16
    keep_rows      int32, the rows kept out of the first 40
    keep_logits    the 4 tokens after those 40, at their own positions, seeing these rows alone
    ring_logits    the same where layers with a window see all that is in it; of models with layers of both kinds
    close_logits   as keep_logits where the kept rows, and the new tokens, move up to positions 0, 1, 2, ...; where
                   positions are learned, rows keep what they took from theirs. Not for models with windows, whose
                   rows transformers throws away
    long_logits    as `logits`, with the factors that LongRoPE has for long texts
    """
    tokens = random_tokens(seed)
    arrays = {
        "logits": forward(model, None, tokens, position=0)[-LAST:],
        "keep_logits": seeing_kept_rows(model, tokens),
    }
    if len(set(getattr(model.config, "layer_types", None) or ())) > 1:
        arrays["ring_logits"] = seeing_kept_rows(model, tokens, in_windows=False)
    if not windows(model):
        cache = DynamicCache(config=model.config)
        forward(model, cache, tokens[:PROMPT], position=0)
        keep(cache, KEEP_ROWS)
        positions = np.array(KEEP_ROWS)
        if model.config.model_type != "gpt2":
            turn(model, cache, np.arange(positions.size) - positions)
        arrays["close_logits"] = forward(model, cache, tokens[PROMPT : PROMPT + AFTER], position=len(KEEP_ROWS))
    if model.config.model_type == "phi3" and model.config.rope_parameters["rope_type"] == "longrope":
        # The length of the text decides for all of its positions; what comes later changes nothing else.
        text = np.resize(tokens, model.config.original_max_position_embeddings + 1)
        arrays["long_logits"] = forward(model, None, text, position=0)[TOKENS - LAST : TOKENS]
    found = {name: rounded(each) for name, each in arrays.items()}
    return {"tokens": tokens, "keep_rows": np.array(KEEP_ROWS, np.int32), **found}


def rounded(logits: Array) -> Array:
    return np.round(logits / LOGIT_STEP) * np.float32(LOGIT_STEP)


def windows(model: PreTrainedModel) -> bool:
    return getattr(model.config, "sliding_window", None) is not None


def seeing_kept_rows(model: PreTrainedModel, tokens: Array, *, in_windows: bool = True) -> Array:
    """Logits of the tokens after PROMPT, by masks: what was evicted after PROMPT is hidden from them alone.

    in_windows: it is hidden in layers with windows, too.
    """
    count = PROMPT + AFTER
    query, key = np.arange(count)[:, None], np.arange(count)
    seen = (key <= query) & ((query < PROMPT) | (key >= PROMPT) | np.isin(key, KEEP_ROWS))
    in_window = (seen if in_windows else key <= query) & (query - key < WINDOW)
    if getattr(model.config, "layer_types", None):
        mask: Any = {"full_attention": additive(seen), "sliding_attention": additive(in_window)}
    else:
        mask = additive(in_window if windows(model) else seen)
    output = model(input_ids=torch.from_numpy(tokens[:count]).long()[None], attention_mask=mask, use_cache=False)
    return output.logits[0, PROMPT:].numpy()


def additive(seen: Array) -> torch.Tensor:
    """A mask as attention adds it to its scores, [1, 1, queries, keys]."""
    return torch.from_numpy(np.where(seen, 0, np.finfo(np.float32).min).astype(np.float32))[None, None]


def forward(model: PreTrainedModel, cache: DynamicCache | None, tokens: Array, position: int) -> Array:
    """Append tokens to the cache, if there is one, the first at `position`, and return their logits."""
    output = model(
        input_ids=torch.from_numpy(tokens).long()[None],
        position_ids=torch.arange(position, position + len(tokens))[None],
        past_key_values=cache,
        use_cache=cache is not None,
    )
    return output.logits[0].numpy()


def stream(model: PreTrainedModel, tokens: Array, in_cache: bool) -> Array:
    """Run chunk by chunk; make room for each by evicting the oldest rows behind the sinks.

    `in_cache` counts positions in the cache: the rows that move up are rotated to their new place.
    Otherwise eviction leaves a gap, and everything keeps its position in the text.
    """
    cache = DynamicCache(config=model.config)
    logits = []
    for start in range(0, len(tokens), CHUNK):
        length = cache.get_seq_length()
        evicted = max(0, length + CHUNK - CAPACITY)
        if evicted:
            keep(cache, [*range(SINKS), *range(SINKS + evicted, length)])
            if in_cache:
                shift(model, cache, first=SINKS, by=-evicted)
        position = length - evicted if in_cache else start
        logits.append(forward(model, cache, tokens[start : start + CHUNK], position))
    return np.concatenate(logits)


def keep(cache: DynamicCache, rows: list[int]) -> None:
    """Drop all other rows from every layer; keys stay rotated as they were."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, rows], layer.values[:, :, rows]


def shift(model: PreTrainedModel, cache: DynamicCache, first: int, by: int) -> None:
    """Rotate the keys of the rows from `first` on, as if their positions had been `by` larger."""
    rows = np.arange(cache.get_seq_length())
    turn(model, cache, np.where(rows < first, 0, by))


def turn(model: PreTrainedModel, cache: DynamicCache, by: Array) -> None:
    """Rotate the key of every row, as if its position had been larger by its entry in `by`."""
    angle = torch.from_numpy(by)[:, None] * model.model.rotary_emb.inv_freq.double()
    cos, sin, width = angle.cos(), angle.sin(), 2 * angle.shape[-1]
    rotated_layers = getattr(model.config, "no_rope_layers", None) or [1] * len(cache.layers)  # which 1 stands for
    for layer, is_rotated in zip(cache.layers, rotated_layers, strict=True):
        if not is_rotated:
            continue
        keys = layer.keys[..., :width].double()
        if model.config.model_type in ("ernie4_5", "glm", "glm4"):  # neighbours are pairs
            a, b = keys[..., ::2], keys[..., 1::2]
            rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = keys.chunk(2, dim=-1)
            rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        layer.keys = torch.cat([rotated.float(), layer.keys[..., width:]], dim=-1)


def train_sentencepiece() -> sentencepiece.SentencePieceProcessor:
    """A BPE vocabulary of 800 with Llama 2's settings, from Python's own manual and the torture texts."""
    lines = [line for _, text in sorted(topics.items()) for line in text.splitlines()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines + TEXTS),
        model_writer=model,
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        character_coverage=0.9995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


if __name__ == "__main__":
    run(main)
