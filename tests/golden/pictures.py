"""Make the golden models with eyes: tiny random ones as transformers saves them, and its answers to a text with a
picture in it.

Run it as `make golden` does. It writes, into the folder that it is given or beside itself, in `pictures/`:

    NAME/       config.json, safetensors in bfloat16 with the tower's tensors, tokenizer.json …
    NAME.npz    tokens, int32 [n], -1 in place of the picture; rows, float32 [m, hidden · (1 + deepstack)], what the
                tower makes of it; grid, its rows and columns; logits [8, vocab] after the last tokens; plain [8, vocab]
                for the text alone, the picture left out
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from fallback import configurations as hybrids
from fallback import settle
from families import configurations as texts
from families import small
from folders import byte_level
from make import fill, rounded
from towers import rows_of
from write import run

BEFORE, BEHIND, LAST = 7, 12, 8
GRID = (2, 3)  # of merged patches, in models whose pictures have any shape
IDS = {"image_token_id": 260, "video_token_id": 261, "vision_start_token_id": 262, "vision_end_token_id": 263}
QWEN_VISION = {
    "depth": 1, "num_heads": 2, "hidden_size": 16, "intermediate_size": 16, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@dataclass
class Golden:
    kind: type[hf.PreTrainedModel]
    config: Any
    pixels: tuple[int, ...]  # shape of the tower's input
    grid: tuple[int, int] = GRID
    inputs: dict[str, Any] = field(default_factory=dict)  # of the tower and the model, besides
    types: str | None = None  # the name of the argument that tells pictures' tokens


def text_of(kind: Any, rope: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A text model's configuration."""
    return dict(small(kind, rope=rope, **others).to_dict())


def qwen(kind: Any, config: Any, text: dict[str, Any], **vision: Any) -> Golden:
    made = config(
        text_config=text,
        vision_config=QWEN_VISION | {"out_hidden_size": text["hidden_size"]} | vision,
        **IDS,
        tie_word_embeddings=True,
    )
    grid = {"image_grid_thw": torch.tensor([[1, 2 * GRID[0], 2 * GRID[1]]])}
    return Golden(kind, made, (4 * GRID[0] * GRID[1], 3 * 2 * 4 * 4), inputs=grid, types="mm_token_type_ids")


def families() -> dict[str, Golden]:
    """Text models have the sizes of other golden ones, so that engines compile no more designs."""
    qwen3 = text_of(hf.Qwen3Config, {"mrope_section": [4, 2, 2], "mrope_interleaved": True}, head_dim=16, theta=1e6)
    qwen2 = text_of(hf.Qwen2Config, {"mrope_section": [1, 1, 2]}, theta=1e6)
    qwen35 = hybrids()["qwen35"].to_dict()
    gemma3 = texts()["gemma3"].to_dict()
    gemma4_vision = SIGLIP | {
        "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2,
        "position_embedding_size": 16, "default_output_length": 6,
    }  # fmt: skip
    cells = {"image_position_ids": torch.tensor([[[x, y] for y in range(4) for x in range(6)]])}
    for each in (qwen3, qwen2, qwen35, gemma3):
        each.pop("model_type", None)
    return {
        "qwen3vl": qwen(
            hf.Qwen3VLForConditionalGeneration, hf.Qwen3VLConfig, qwen3, depth=2, num_position_embeddings=16,
            deepstack_visual_indexes=[0],
        ),
        "qwen2vl": qwen(
            hf.Qwen2_5_VLForConditionalGeneration, hf.Qwen2_5_VLConfig, qwen2, window_size=16, fullatt_block_indexes=[0]
        ),
        "qwen35": qwen(hf.Qwen3_5ForConditionalGeneration, hf.Qwen3_5Config, qwen35, num_position_embeddings=16),
        "gemma3": Golden(
            hf.Gemma3ForConditionalGeneration,
            hf.Gemma3Config(
                text_config=gemma3, vision_config=SIGLIP | {"image_size": 28, "patch_size": 7}, mm_tokens_per_image=4,
                image_token_id=260,
            ),
            (1, 3, 28, 28), (2, 2), types="token_type_ids",
        ),
        "gemma4": Golden(
            hf.Gemma4ForConditionalGeneration,
            hf.Gemma4Config(
                text_config=hybrids()["gemma4"].to_dict() | {"pad_token_id": 0},
                vision_config=gemma4_vision,
                audio_config=None, image_token_id=260, video_token_id=261, audio_token_id=264,
            ),
            (1, 24, 48), types="mm_token_type_ids", inputs=cells,
        ),
        "lfm2": Golden(
            hf.Lfm2VlForConditionalGeneration,
            hf.Lfm2VlConfig(
                text_config=hybrids()["lfm2"].to_dict(),
                vision_config=SIGLIP | {"patch_size": 4, "num_patches": 16, "model_type": "siglip2_vision_model"},
                downsample_factor=2, projector_hidden_size=16, image_token_id=260,
            ),
            (1, 24, 48),
            inputs={
                "spatial_shapes": torch.tensor([[4, 6]]),
                "pixel_attention_mask": torch.ones(1, 24, dtype=torch.long),
            },
        ),
        "smolvlm": Golden(
            hf.SmolVLMForConditionalGeneration,
            hf.SmolVLMConfig(
                text_config=text_of(hf.LlamaConfig, {}, head_dim=16, hidden=64, ffn=96), scale_factor=2,
                vision_config=SIGLIP | {"image_size": 16, "patch_size": 4}, image_token_id=260, pad_token_id=2,
                tie_word_embeddings=True,
            ),
            (1, 1, 3, 16, 16), (2, 2),
        ),
        "gemma4moe": Golden(
            hf.Gemma4ForConditionalGeneration,
            hf.Gemma4Config(
                text_config=hybrids()["gemma4moe"].to_dict() | {
                    "pad_token_id": 0, "use_bidirectional_attention": "vision", "num_hidden_layers": 3,
                    # A layer that is causal lies before one that is not, so that answers tell them apart.
                    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                    "per_layer_config": {at: {"head_dim": 32, "num_key_value_heads": 1} for at in ("0", "2")},
                },
                vision_config=gemma4_vision, audio_config=None, image_token_id=260, video_token_id=261,
                audio_token_id=264,
            ),
            (1, 24, 48), types="mm_token_type_ids", inputs=cells,
        ),
    }  # fmt: skip


def main(out: Path, *names: str) -> None:
    (out / "pictures").mkdir(exist_ok=True)
    for seed, (name, golden) in enumerate(families().items(), start=401):
        if not names or name in names:
            write(out / "pictures" / name, golden, seed)


def write(folder: Path, golden: Golden, seed: int) -> None:
    golden.config._attn_implementation = "eager"
    model = settle(fill(golden.kind._from_config(golden.config), seed), seed)
    model.to(torch.bfloat16).save_pretrained(folder)
    read: Any = golden.kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    random = np.random.default_rng(seed)
    pixels = torch.from_numpy(random.standard_normal(golden.pixels).astype(np.float32))
    seen = read.model.get_image_features(pixels, **golden.inputs, return_dict=True)
    rows = rows_of(seen)
    text = random.integers(3, 259, BEFORE + BEHIND).astype(np.int64)
    tokens = np.concatenate([text[:BEFORE], np.full(len(rows), IDS["image_token_id"]), text[BEFORE:]])
    ids = torch.from_numpy(tokens)[None]
    told = {golden.types: (ids == IDS["image_token_id"]).int()} if golden.types else {}
    logits = read(input_ids=ids, pixel_values=pixels, **golden.inputs, **told, use_cache=False).logits
    blank = {name: torch.zeros_like(each)[:, : text.size] for name, each in told.items()}
    plain = read(input_ids=torch.from_numpy(text)[None], **blank, use_cache=False).logits
    assert len(rows) == golden.grid[0] * golden.grid[1]
    np.savez_compressed(
        folder.with_suffix(".npz"), tokens=np.where(tokens == IDS["image_token_id"], -1, tokens).astype(np.int32),
        rows=rows.numpy(), grid=np.array(golden.grid), logits=rounded(logits[0, -LAST:].numpy()),
        plain=rounded(plain[0, -LAST:].numpy()),
    )  # fmt: skip
    byte_level(folder.name).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    run(main)
