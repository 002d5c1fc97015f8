"""Make the golden towers: tiny random encoders of pictures, and what transformers makes of a picture.

Run it as `make golden` does; it needs torch, transformers, gguf and pillow. It writes, into the folder it is given or
beside itself, in `towers/`:

    NAME/       the encoder in float16, with the folder's JSON files
    NAME.gguf   an encoder in float16, as llama.cpp's converter writes its mmproj
    NAME.npz    picture, uint8 [height, width, 3]; pixels, uint8, each seventh of the values of all tiles, one
                tile after the other, of which transformers' processor makes its own; rows [tokens, hidden] for the text
                model; prompt: the text in place of the picture, in which `IMAGE` stands for a row
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as hf
from gguf.constants import MODEL_ARCH
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from write import finish, run

Array = NDArray[Any]

Tensors = Callable[[str, Array], Iterator[tuple[str, Array]]]
"""GGUF's tensors of one of transformers."""

STRIDE = 7  # of the values that are kept
HALF = [0.5, 0.5, 0.5]
VISION = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 40}
TEXT = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1,
    "intermediate_size": 32, "head_dim": 16, "vocab_size": 300,
}  # fmt: skip


@dataclass
class Golden:
    """A model, and what `write` needs of it. model: with `get_image_features`."""

    model: hf.PreTrainedModel
    kind: str
    fields: dict[str, Any]  # of `clip.vision`, beside those of `VISION`
    tensors: Tensors
    inputs: dict[str, Any]  # of `get_image_features`
    pixels: Array
    prompt: str
    processor: Any
    eps: float = 1e-6


def main(out: Path, *names: str) -> None:
    out = out / "towers"
    out.mkdir(exist_ok=True)
    for seed, (name, make) in enumerate(FAMILIES.items(), start=301):
        if not names or name in names:
            shown = picture(seed)
            golden = make(shown, seed)
            write_mmproj(out / f"{name}.gguf", golden)
            np.savez_compressed(out / f"{name}.npz", picture=shown, **answers(golden))
            write_folder(out / name, golden)


def picture(seed: int, height: int = 30, width: int = 44) -> Array:
    """Colours that change smoothly, bars and dots."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    smooth = np.stack([x * 5, y * 8, 255 - x * 3 - y * 3], axis=-1)
    smooth[height // 2 :, ::7] = random.integers(0, 256, 3)
    smooth[::9, width // 3 :: 5] = 255
    return np.clip(smooth, 0, 255).astype(np.uint8)


def fill(model: hf.PreTrainedModel, seed: int) -> Any:
    random = np.random.default_rng(seed)
    for name, weight in model.named_parameters():
        drawn = random.standard_normal(weight.shape)
        if weight.ndim == 1:
            drawn = 1 + 0.2 * drawn if "norm" in name.lower() and name.endswith("weight") else 0.3 * drawn
        elif weight.ndim > 1:
            drawn *= 1.2 / np.sqrt(np.prod(weight.shape[1:]))
        weight.copy_(
            torch.from_numpy(np.asarray(drawn)).half() if weight.ndim > 1 else torch.from_numpy(np.asarray(drawn))
        )
    return model.float().eval()


def answers(golden: Golden) -> dict[str, Array]:
    found = golden.model.get_image_features(**golden.inputs, return_dict=True)
    pixels = golden.pixels.astype(np.uint8).reshape(-1)[::STRIDE]
    return {"pixels": pixels, "rows": rows_of(found).numpy(), "prompt": np.array(golden.prompt)}


def rows_of(found: Any) -> torch.Tensor:
    """What a tower makes of pictures: its rows, and those of earlier layers beside them."""
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    whole = (torch.cat(list(each)) if isinstance(each, list | tuple) else each for each in parts)
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in whole], dim=1)


def answered(model: Any, inputs: Any, steps: int, padding: int) -> dict[str, Array]:
    """The prompt's ids, the logits behind them, and a greedy answer."""
    ids = inputs["input_ids"]
    answer = model.generate(**inputs, max_new_tokens=steps, do_sample=False, eos_token_id=None, pad_token_id=padding)
    found = {"ids": ids[0].numpy(), "greedy": answer[0, ids.shape[1] :].numpy()}
    logits = model(**inputs).logits[0, -1].numpy()
    return {key: each.astype(np.int32) for key, each in found.items()} | {"logits": logits}


def write_folder(folder: Path, golden: Golden) -> None:
    """The encoder's part of the folder that transformers saves."""
    whole = hf.AutoModelForImageTextToText.from_config(golden.model.config)
    whole.model.load_state_dict(golden.model.state_dict())
    for name, values in whole.model.named_buffers():  # which some classes make anew
        values.copy_(golden.model.get_buffer(name))
    whole.half().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not re.search(r"language_model|text_model|lm_head", name)}
    save_file(kept, folder / "model.safetensors")
    golden.processor.save_pretrained(folder)


def begin_mmproj(path: Path) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_name(path.stem)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    return writer


def write_mmproj(path: Path, golden: Golden) -> None:
    writer = begin_mmproj(path)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(golden.kind)
    writer.add_vision_projection_dim(TEXT["hidden_size"])
    writer.add_vision_embedding_length(VISION["hidden_size"])
    writer.add_vision_feed_forward_length(VISION["intermediate_size"])
    writer.add_vision_head_count(VISION["num_attention_heads"])
    writer.add_vision_attention_layernorm_eps(golden.eps)
    for name, value in ({"vision_block_count": VISION["num_hidden_layers"]} | golden.fields).items():
        getattr(writer, f"add_{name}")(value)
    for name, tensor in golden.model.state_dict().items():
        for written, values in golden.tensors(name, tensor.numpy()):
            matrix = values.ndim > 1 and "position" not in written
            writer.add_tensor(written, np.ascontiguousarray(values, np.float16 if matrix else np.float32))
    finish(writer)


def mapped(*parts: str, rename: Callable[[str], str] = lambda name: name) -> Tensors:
    """GGUF's names of the tensors whose names have one of these parts."""
    names = gguf.get_tensor_name_map(MODEL_ARCH.MMPROJ, 8)

    def tensors(name: str, values: Array) -> Iterator[tuple[str, Array]]:
        if any(part in name for part in parts):
            ours = names.get_name(rename(name), try_suffixes=(".weight", ".bias"))
            assert ours, name
            yield ours, values

    return tensors


def levels(values: Any, mean: float = 0.5, std: float = 0.5) -> Array:
    """The bytes of normalised values; channels last."""
    values = values.double().numpy()
    found = np.rint((values * std + mean) * 255)
    assert np.abs((found / 255 - mean) / std - values).max() < 1e-6
    return np.moveaxis(found, -3, -1)


def described(
    size: int, patch: int, mean: list[float] = HALF, std: list[float] = HALF, *, gelu: bool = True, **others: Any
) -> dict[str, Any]:
    """Fields of an encoder. size: of the pictures that it was trained with."""
    found = {"image_size": size, "patch_size": patch, "image_mean": mean, "image_std": std}
    found |= ({"use_gelu": True} if gelu else {}) | others
    return {f"vision_{name}": value for name, value in found.items()}


def smolvlm(shown: Array, seed: int) -> Golden:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    side, patch = 32, 8
    config = hf.SmolVLMConfig(
        vision_config=VISION | {"image_size": side, "patch_size": patch}, scale_factor=2, image_token_id=290,
        text_config=TEXT | {"model_type": "llama"},
    )  # fmt: skip
    processor = SmolVLMImageProcessorPil(
        size={"longest_edge": 2 * side}, max_image_size={"longest_edge": side}, return_row_col_info=True
    )
    found = processor(shown, return_tensors="pt", do_image_splitting=True)
    prompt = get_image_prompt_string(
        found.rows[0][0], found.cols[0][0], 4, "<fake_token_around_image>", IMAGE, "<global-img>"
    )
    scale = {"projector_scale_factor": 2, "use_gelu": True, "preproc_image_size": 2 * side}
    names = mapped("vision_model", "connector", rename=lambda name: f"model.{name}")
    inputs = {"pixel_values": found.pixel_values, "pixel_attention_mask": found.pixel_attention_mask}
    model, pixels = fill(hf.SmolVLMModel(config), seed), levels(found.pixel_values)
    fields = described(side, patch, gelu=False, **scale)
    return Golden(model, "idefics3", fields, names, inputs, pixels, prompt, processor)


def of_siglip(name: str) -> str:
    """The name that GGUF's table knows."""
    name = name.replace("_weight", ".weight").replace("vision_tower.", "vision_tower.vision_model.")
    return name.replace("vision_model.vision_model", "vision_model")


def gemma3(shown: Array, seed: int) -> Golden:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    side, patch = 32, 4
    config = hf.Gemma3Config(
        vision_config=VISION | {"image_size": side, "patch_size": patch, "model_type": "siglip_vision_model",
            "vision_use_head": False},
        text_config=TEXT | {"model_type": "gemma3_text"}, mm_tokens_per_image=4, image_token_id=290,
    )  # fmt: skip
    processor = Gemma3ImageProcessorPil(size={"height": side, "width": side})
    found = processor(shown, return_tensors="pt")
    names = mapped("vision_tower", "multi_modal_projector", rename=of_siglip)

    def tensors(name: str, values: Array) -> Iterator[tuple[str, Array]]:
        yield from names(name, values + 1 if "soft_emb_norm" in name else values)

    prompt = f"\n\n<start_of_image>{IMAGE * 4}<end_of_image>\n\n"
    inputs = {"pixel_values": found.pixel_values}
    model, pixels = fill(hf.Gemma3Model(config), seed), levels(found.pixel_values)
    return Golden(model, "gemma3", described(side, patch), tensors, inputs, pixels, prompt, processor)


def qwen_config(kind: Any, depth: int, **vision: Any) -> Any:
    return kind(
        vision_config={
            "hidden_size": VISION["hidden_size"], "num_heads": 2, "depth": depth,
            "intermediate_size": VISION["intermediate_size"], "out_hidden_size": TEXT["hidden_size"], **vision,
        },
        text_config=TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
        image_token_id=290, video_token_id=291, vision_start_token_id=292, vision_end_token_id=293,
    )  # fmt: skip


def qwen_tensors(name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """A frame of a film has patches of its own."""
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", values[:, :, 0]
        yield "v.patch_embd.weight.1", values[:, :, 1]
    else:
        yield from mapped("visual.")(name, values)


def qwen(
    model: hf.PreTrainedModel, kind: str, fields: dict[str, Any], tensors: Tensors, processor: Any, found: Any,
    pixels: Any, patch: int, *scale: float,
) -> Golden:  # fmt: skip
    """found: by the processor. pixels: its values, of patches in blocks of 2 × 2; scale: their mean and deviation."""
    _, rows, columns = found.image_grid_thw[0].tolist()
    parts = pixels.reshape(rows // 2, columns // 2, 2, 2, 3, 2, patch, patch)[:, :, :, :, :, 0]
    whole = levels(parts.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch), *scale)
    inputs = {"pixel_values": found.pixel_values, "image_grid_thw": found.image_grid_thw}
    prompt = f"<|vision_start|>{IMAGE * (rows * columns // 4)}<|vision_end|>"
    return Golden(model, kind, fields, tensors, inputs, whole, prompt, processor)


def qwen3vl(shown: Array, seed: int) -> Golden:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    patch, deep = 8, [0]
    config = qwen_config(
        hf.Qwen3VLConfig, 2, patch_size=patch, num_position_embeddings=9, deepstack_visual_indexes=deep
    )
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 256, "longest_edge": 1 << 20}, patch_size=patch, image_mean=HALF, image_std=HALF
    )
    found = processor(shown, return_tensors="pt")
    fields = described(
        3 * patch, patch, spatial_merge_size=2, min_pixels=256, block_count=2,
        is_deepstack_layers=[number in deep for number in range(2)],
    )  # fmt: skip

    def tensors(name: str, values: Array) -> Iterator[tuple[str, Array]]:
        stem, _, kind = name.rpartition(".")
        if name.startswith("visual.deepstack"):
            part = stem.rpartition(".")[2].replace("linear_", "")
            yield f"v.deepstack.{deep[int(name.split('.')[2])]}.{part}.{kind}", values
        elif name.startswith("visual.merger"):
            yield MERGER[stem.rpartition(".")[2]] + f".{kind}", values
        else:
            yield from qwen_tensors(name, values)

    model = fill(hf.Qwen3VLModel(config), seed)
    return qwen(model, "qwen3vl_merger", fields, tensors, processor, found, found.pixel_values, patch)


def gemma4(shown: Array, seed: int) -> Golden:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    patch = 2
    config = hf.Gemma4Config(
        vision_config=VISION | {
            "num_key_value_heads": 2, "head_dim": 12, "patch_size": patch, "position_embedding_size": 210,
            "use_clipped_linears": True, "standardize": True,
        },
        text_config=TEXT | {"vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 8},
        audio_config=None, image_token_id=290,
    )  # fmt: skip
    processor = Gemma4ImageProcessorPil(patch_size=patch, max_soft_tokens=70)
    found = processor(shown, return_tensors="pt")
    model, random = fill(hf.Gemma4Model(config), seed), np.random.default_rng(seed)
    for name, values in model.named_buffers():
        if "std_" in name:
            values.copy_(torch.from_numpy(0.5 + random.random(values.shape)))
        elif name.endswith(("_min", "_max")):
            values.fill_(BOUNDS[name.rpartition(".")[2]])
    names = gguf.get_tensor_name_map(MODEL_ARCH.MMPROJ, 8)

    def tensors(name: str, values: Array) -> Iterator[tuple[str, Array]]:
        name = f"model.{name}".replace("model.vision_tower.encoder.", "vision_model.model.")
        name = name.replace(".linear.weight", ".weight")
        stem, _, kind = name.rpartition(".")
        if "patch_embedder.input_proj" in name:
            yield "v.patch_embd.weight", values.reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2)
        elif "position_embedding_table" in name:
            yield "v.position_embd.weight", values
        elif "vision_tower.std_" in name:
            yield f"v.{kind}", values
        elif "embed_vision" in name:
            yield "mm.input_projection.weight", values
        elif name.startswith("vision_model"):
            ours = names.get_name(f"{stem}.linear") or names.get_name(stem)
            assert ours, name
            yield f"{ours}.{kind}", values.reshape(values.shape or 1)

    inputs = {"pixel_values": found.pixel_values, "image_position_ids": found.image_position_ids}
    count = int(found.num_soft_tokens_per_image[0])
    columns = int(found.image_position_ids[0, :, 0].max()) + 1
    parts = found.pixel_values[0, : count * 9].reshape(-1, columns, patch, patch, 3).permute(4, 0, 2, 1, 3)
    pixels = levels(parts.reshape(3, -1, columns * patch), 0.0, 1.0)
    fields, prompt = described(224, patch, [0.0] * 3, [1.0] * 3, gelu=False), f"<|image>{IMAGE * count}<image|>"
    return Golden(model, "gemma4v", fields, tensors, inputs, pixels, prompt, processor)


def lfm2(shown: Array, seed: int) -> Golden:
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

    patch, factor = 16, 2
    config = hf.Lfm2VlConfig(
        vision_config=VISION | {"patch_size": patch, "num_patches": 16, "model_type": "siglip2_vision_model",
                                "vision_use_head": False},
        text_config=TEXT | {"model_type": "lfm2", "layer_types": ["full_attention"]}, image_token_id=290,
        downsample_factor=factor, projector_hidden_size=40,
    )  # fmt: skip
    processor = Lfm2VlImageProcessor()
    found = processor(shown, return_tensors="pt")
    rows, columns = found.spatial_shapes[0].tolist()
    values = found.pixel_values[0, : rows * columns].reshape(rows, columns, patch, patch, 3).permute(4, 0, 2, 1, 3)
    names = mapped("vision_tower", "multi_modal_projector", rename=of_siglip)

    def tensors(name: str, values: Array) -> Iterator[tuple[str, Array]]:
        if "patch_embedding.weight" in name:
            values = values.reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2)
        yield from names(name, values)

    fields = described(4 * patch, patch, projector_scale_factor=factor)
    inputs = {key: found[key] for key in ("pixel_values", "spatial_shapes", "pixel_attention_mask")}
    pixels = levels(values.reshape(3, rows * patch, columns * patch))
    prompt = f"<|image_start|>{IMAGE * (rows * columns // factor**2)}<|image_end|>"
    return Golden(fill(hf.Lfm2VlModel(config), seed), "lfm2", fields, tensors, inputs, pixels, prompt, processor)


def qwen25vl(shown: Array, seed: int) -> Golden:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    patch, least, most = 14, 140 * 112, 1 << 20
    config = qwen_config(hf.Qwen2_5_VLConfig, 2, patch_size=patch, fullatt_block_indexes=[1], window_size=112)
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": least, "longest_edge": most}, image_mean=mean, image_std=std
    )
    found = processor(shown, return_tensors="pt")
    fields = described(
        560, patch, mean, std, gelu=False, use_silu=True, spatial_merge_size=2, min_pixels=least, max_pixels=most,
        n_wa_pattern=2, block_count=2,
    )  # fmt: skip

    def tensors(name: str, values: Array) -> Iterator[tuple[str, Array]]:
        if ".attn.qkv." in name:
            for part, each in zip("qkv", np.split(values, 3), strict=True):
                yield from mapped("visual.")(name.replace("qkv", part), each)
        else:
            yield from qwen_tensors(name, values)

    scale, shift = (torch.tensor(each).reshape(3, 1, 1, 1) for each in (std, mean))
    plain = found.pixel_values.reshape(-1, 3, 2, patch**2).transpose(1, 2).flatten(2).reshape(-1, 2, 3, patch**2)
    plain = (plain * scale.reshape(3, 1) + shift.reshape(3, 1)).transpose(1, 2).reshape(found.pixel_values.shape)
    model = fill(hf.Qwen2_5_VLModel(config), seed)
    return qwen(model, "qwen2.5vl_merger", fields, tensors, processor, found, plain, patch, 0.0, 1.0)


BOUNDS = {"input_min": -1.5, "input_max": 1.7, "output_min": -1.2, "output_max": 1.4}
MERGER = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
IMAGE = "<image>"
FAMILIES: dict[str, Callable[[Array, int], Golden]] = {
    "smolvlm": smolvlm, "gemma3": gemma3, "qwen3vl": qwen3vl, "gemma4": gemma4, "lfm2": lfm2,
    "qwen25vl": qwen25vl,
}  # fmt: skip

if __name__ == "__main__":
    run(main)
