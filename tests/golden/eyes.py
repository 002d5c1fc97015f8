"""Make the golden model that sees: a tiny random SmolVLM as in towers.py, and what transformers writes.

Run it as `make golden` does. It writes, beside itself in `eyes/`:

    mmproj.gguf   the encoder
    smolvlm.gguf  the text model, with SmolVLM's special tokens and a template of its form
    smolvlm.npz   pictures, uint8 [height, width, 3] (first, second); of each conversation of `CONVERSATIONS`: NAME.ids,
                  int32 [n], with the placeholder's id in place of rows; NAME.logits, float32 [vocab], behind the last
                  token; NAME.greedy, int32 [m], the greedy answer
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from towers import TEXT, answered, fill, picture, smolvlm, write_mmproj
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, SmolVLMForConditionalGeneration
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from write import CONTROL, byte_pairs, bytes_of, bytes_vocabulary, run, write_gguf

SEED, STEPS = 341, 12
TILES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
ADDED = ["<end_of_utterance>", "<fake_token_around_image>", "<global-img>", *TILES]
ADDED += [f"<unused_{number}>" for number in range(290 - len(bytes_vocabulary()) - len(ADDED))] + ["<image>"]
TOKENS = bytes_vocabulary() + ADDED + [f"<rest_{number}>" for number in range(291, TEXT["vocab_size"])]
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def says(role: str, *parts: str) -> dict[str, Any]:
    """A message; a part in brackets names a picture."""
    return {"role": role, "content": [
        {"type": "image", "name": part[1:-1]} if part[0] == "[" else {"type": "text", "text": part} for part in parts
    ]}  # fmt: skip


CONVERSATIONS = {
    "one": [says("user", "[first]", "What is in the picture?")],
    "two": [
        says("user", "[first]", "What is it?"), says("assistant", "A bar."), says("user", "And this:", "[second]", "?"),
    ],
    "text": [says("user", "Hello there.")],
}  # fmt: skip


def main(out: Path) -> None:
    out = out / "eyes"
    out.mkdir(exist_ok=True)
    pictures = {"first": picture(SEED), "second": picture(SEED + 1, 40, 25)}
    golden = smolvlm(pictures["first"], SEED)
    write_mmproj(out / "mmproj.gguf", golden)
    core = golden.model
    config = core.config
    config.tie_word_embeddings = False
    full = SmolVLMForConditionalGeneration(config)
    fill(full, SEED + 100)
    full.model = core
    full.eval()
    text = LlamaForCausalLM(config.text_config)
    text.config.tie_word_embeddings = False
    text.model, text.lm_head = core.text_model, full.lm_head
    write_gguf(out / "smolvlm.gguf", text, VOCABULARY)
    processor = make_processor()
    found: dict[str, Any] = dict(pictures)
    for name, messages in CONVERSATIONS.items():
        prompt = processor.tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
        )
        shown = [Image.fromarray(pictures[part["name"]]) for each in messages for part in each["content"]
                 if part["type"] == "image"]  # fmt: skip
        inputs = processor(text=prompt, images=shown or None, return_tensors="pt", add_special_tokens=False)
        said = answered(full, inputs, STEPS, padding=2)
        found |= {f"{name}.{key}": each for key, each in said.items()}
    np.savez_compressed(out / "smolvlm.npz", **found)


def make_processor() -> SmolVLMProcessor:
    tokenizer = byte_pairs(TOKENS)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>")
    wrapped.add_special_tokens({"additional_special_tokens": [*CONTROL[:1], *ADDED]})
    wrapped.image_token, wrapped.fake_image_token = "<image>", "<fake_token_around_image>"
    wrapped.global_image_token, wrapped.end_of_utterance_token = "<global-img>", "<end_of_utterance>"
    side = 32
    pixels = SmolVLMImageProcessorPil(
        size={"longest_edge": 2 * side}, max_image_size={"longest_edge": side}, return_row_col_info=True
    )
    SmolVLMProcessor.check_argument_for_proper_class = lambda *_: None  # it would want a reader of videos, too
    return SmolVLMProcessor(pixels, wrapped, None, image_seq_len=4, chat_template=TEMPLATE)


VOCABULARY = bytes_of(
    TOKENS, {*CONTROL, *TOKENS[len(bytes_vocabulary()) :]}, end=TOKENS.index("<end_of_utterance>"), template=TEMPLATE
)


if __name__ == "__main__":
    run(main)
