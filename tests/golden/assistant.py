"""Make the golden assistant of Gemma 4: a tiny random drafter, and what transformers drafts with it.

Run it with the Python of `make golden`, after `folders.py`. It writes

    folders/gemma4_assistant/      config.json, safetensors, tokenizer.json …: for the model in folders/gemma4_text
    folders/gemma4_assistant.npz   tokens [n]; of drafts after the first `short` and after all n of them: the drafted
                                   tokens [2, DRAFTS], the logits before each [2, DRAFTS, vocab], and the states after
                                   each [2, DRAFTS, backbone]

Rows of layers with a window are those that a token at the next position sees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from fallback import settle
from folders import tokenizer_of
from make import fill
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig
from write import run

NAME, TARGET, SEED = "gemma4_assistant", "gemma4_text", 91
TOKENS, SHORT, DRAFTS = 40, 12, 3
CENTROIDS, USED = 16, 4


def configuration(target: Any) -> Gemma4AssistantConfig:
    text = Gemma4TextConfig(
        hidden_size=8, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=16,
        head_dim=16, vocab_size=target.vocab_size, max_position_embeddings=512, rms_norm_eps=1e-5,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], sliding_window=target.sliding_window,
        num_kv_shared_layers=4, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
        rope_parameters=target.rope_parameters, per_layer_config={"3": {"head_dim": 32}}, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    return Gemma4AssistantConfig(
        text_config=text.to_dict(), backbone_hidden_size=target.hidden_size, use_ordered_embeddings=True,
        num_centroids=CENTROIDS, centroid_intermediate_top_k=USED,
    )  # fmt: skip


def drafts(model: Any, assistant: Any, tokens: np.ndarray) -> tuple[Any, ...]:
    """The last token has not been run by the model."""
    ids = torch.from_numpy(tokens).long()[None]
    out = model.model(input_ids=ids[:, :-1], use_cache=False, return_shared_kv_states=True)
    state, rows = out.last_hidden_state[:, -1:], dict(out.shared_kv_states)
    sees = model.config.sliding_window - 1
    rows["sliding_attention"] = tuple(each[:, :, -sees:] for each in rows["sliding_attention"])
    position, token, found = torch.tensor([[ids.shape[1] - 1]]), ids[:, -1:], []
    for _ in range(DRAFTS):
        joined = torch.cat([model.get_input_embeddings()(token), state], -1)
        step = assistant(inputs_embeds=joined, position_ids=position, shared_kv_states=rows, use_cache=False)
        token, state = step.logits.argmax(-1), step.last_hidden_state
        found.append((token[0, 0].numpy(), step.logits[0, 0].numpy(), state[0, 0].numpy()))
    return tuple(map(np.stack, zip(*found, strict=True)))


def main(out: Path) -> None:
    options: Any = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = Gemma4ForCausalLM.from_pretrained(out / "folders" / TARGET, **options).eval()
    assistant = Gemma4AssistantForCausalLM(configuration(model.config))
    assistant.config.get_text_config().model_type = "gemma4_text"
    settle(fill(assistant, SEED), SEED)
    random, folder = np.random.default_rng(SEED), out / "folders" / NAME
    for name, weight in assistant.named_parameters():
        if "norm" in name:
            weight.copy_(torch.from_numpy(1 + 0.2 * random.standard_normal(weight.shape)))
    assistant.masked_embedding.token_ordering.copy_(torch.from_numpy(random.permutation(model.config.vocab_size)))
    assistant.to(torch.bfloat16).save_pretrained(folder)
    assistant = Gemma4AssistantForCausalLM.from_pretrained(folder, **options).eval()
    tokens = random.integers(3, model.config.vocab_size, TOKENS, dtype=np.int32)
    found = zip(*(drafts(model, assistant, tokens[:count]) for count in (SHORT, TOKENS)), strict=True)
    drafted, logits, states = map(np.stack, found)
    np.savez_compressed(folder.with_suffix(".npz"), tokens=tokens, short=SHORT, drafts=drafted, logits=logits,
                        states=states)  # fmt: skip
    tokenizer_of(TARGET).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    run(main)
