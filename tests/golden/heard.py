"""Make the golden encoders of sounds: tiny random models, and what transformers makes of the sounds of sounds.py.

Run it as `make golden` does; it needs torch, transformers and gguf. It writes, into the folder it is given or beside
itself, in `heard/`:

    NAME/       the encoder in float16, with the folder's JSON files; of qwen2audio, qwen3asr and gemma4 the text model,
                too
    NAME.gguf   an encoder in float16, as llama.cpp's converter writes its mmproj
    NAME.npz    of each sound (short, long): SOUND.mel, float32, each seventh value of the spectrogram that
                transformers' extractor makes; SOUND.rows [tokens, hidden], what the text model gets in place of tokens
    qwen2.gguf  the text model of qwen2audio, with a template of its form
    qwen2.npz   of each conversation of `CONVERSATIONS`: NAME.ids, int32 [n], with the placeholder's id in place of
                rows; NAME.logits, float32 [vocab], behind the last token; NAME.greedy, int32 [m], the greedy answer

Ultravox is no part of transformers: its encoder here is transformers' Whisper, its projector the published one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as hf
from fallback import configurations, settle
from gguf.constants import MODEL_ARCH
from numpy.typing import NDArray
from safetensors.torch import save_file
from sounds import LONG, LONGER, SHORT, chirp
from tokenizers import AddedToken, Tokenizer
from torch import nn
from towers import BOUNDS, STRIDE, TEXT, VISION, answered, begin_mmproj, fill
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.whisper.modeling_whisper import WhisperEncoder
from write import CONTROL, byte_pairs, bytes_of, bytes_vocabulary, finish, run, write_gguf

Array = NDArray[Any]

MELS, WINDOW = 16, 1  # bands; seconds of a window, 30 in real models
CORE = {
    "d_model": 24, "encoder_attention_heads": 2, "encoder_layers": 1, "encoder_ffn_dim": 40, "num_mel_bins": MELS,
}  # fmt: skip
AUDIO = CORE | {"max_source_positions": 50 * WINDOW}
SOUNDS = {"short": chirp(SHORT), "long": chirp(LONG), "longer": chirp(LONGER)}
PLACEHOLDER, STEPS = 290, 12
ADDED = ["<|audio_bos|>", "<|audio_eos|>"]
ADDED += [f"<unused_{number}>" for number in range(PLACEHOLDER - len(bytes_vocabulary()) - len(ADDED))] + ["<|AUDIO|>"]
TOKENS = bytes_vocabulary() + ADDED + [f"<rest_{number}>" for number in range(291, TEXT["vocab_size"])]
ASR = {"<|audio_bos|>": "<|audio_start|>", "<|audio_eos|>": "<|audio_end|>", "<|AUDIO|>": "<|audio_pad|>"}
GEMMA = {"<|audio_bos|>": "<|audio>", "<|audio_eos|>": "<audio|>", "<|AUDIO|>": "<|audio|>"}
TEMPLATE = (
    "{% set sounds = namespace(n=0) %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' or 'audio_url' in part %}{% set sounds.n = sounds.n + 1 %}"
    "Audio {{ sounds.n }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATIONS = {  # a name in brackets is that of a sound
    "one": [("user", "[short]", "What is heard?")],
    "two": [("user", "[short]", "What is it?"), ("assistant", "A tone."), ("user", "And this: ", "[other]", "?")],
}
VOCABULARY = bytes_of(TOKENS, {*CONTROL, *TOKENS[len(bytes_vocabulary()) :]}, padding=0, template=TEMPLATE)
NAMES = gguf.get_tensor_name_map(MODEL_ARCH.MMPROJ, 8)


@dataclass
class Golden:
    """A model. encode: a sound to its spectrogram and rows."""

    model: nn.Module
    kind: str
    config: dict[str, Any]  # of the folder
    encode: Callable[[Array], tuple[Array, Array]]
    stack: int = 0
    extractor: Any = None
    fields: Mapping[str, int] = field(default_factory=dict)  # that differ from `AUDIO`


def main(out: Path, *names: str) -> None:
    out = out / "heard"
    out.mkdir(exist_ok=True)
    for seed, (name, make) in enumerate(FAMILIES.items(), start=401):
        if names and name not in names:
            continue
        golden = make(seed)
        write_mmproj(out / f"{name}.gguf", golden)
        found = {}
        for sound, samples in SOUNDS.items():
            if name == "qwen2audio" and sound == "long":
                continue  # transformers cuts it
            if name not in ("qwen3asr", "gemma4") and sound == "longer":
                continue
            mel, rows = golden.encode(samples)
            found[f"{sound}.rows"] = rows
            if name != "gemma4" or sound == "short":
                found[f"{sound}.mel"] = mel.reshape(-1)[::STRIDE].astype(np.float32)
            print(name, sound, mel.shape, rows.shape)
        np.savez_compressed(out / f"{name}.npz", **found)
        write_folder(out / name, golden)
        if renamed := {"qwen3asr": ASR, "gemma4": GEMMA}.get(name):
            np.savez_compressed(out / f"{name}.npz", **found, **answer_to_one(golden, renamed))
            write_whole(out / name, golden, renamed)
        if name == "qwen2audio":
            write_gguf(out / "qwen2.gguf", text_of(golden.model), VOCABULARY)
            np.savez_compressed(out / "qwen2.npz", **answers(golden))
            write_whole(out / name, golden)


def write_mmproj(path: Path, golden: Golden) -> None:
    writer = begin_mmproj(path)
    writer.add_clip_has_audio_encoder(True)
    if golden.kind == "gemma4a":  # whose file may also have an encoder of pictures
        writer.add_clip_audio_projector_type(golden.kind)
    else:
        writer.add_clip_projector_type(golden.kind)
    writer.add_audio_projection_dim(TEXT["hidden_size"])
    writer.add_audio_embedding_length(AUDIO["d_model"])
    writer.add_audio_feed_forward_length(golden.fields.get("feed_forward_length", AUDIO["encoder_ffn_dim"]))
    writer.add_audio_block_count(golden.fields.get("block_count", AUDIO["encoder_layers"]))
    writer.add_audio_head_count(AUDIO["encoder_attention_heads"])
    writer.add_audio_attention_layernorm_eps(1e-5)
    writer.add_audio_num_mel_bins(golden.fields.get("num_mel_bins", MELS))
    if golden.stack:
        writer.add_audio_stack_factor(golden.stack)
    for name, values in tensors_of(golden):
        writer.add_tensor(name, values)
    if golden.kind == "qwen3a":
        writer.add_tensor("a.position_embd.weight", golden.model.model.audio_tower.positional_embedding(13).numpy())
    finish(writer)


def tensors_of(golden: Golden) -> Iterator[tuple[str, Array]]:
    for name, tensor in state_of(golden.model).items():
        if golden.kind == "gemma4a":
            if "audio" in name:
                yield of_conformer(name, tensor.numpy())
            continue
        name = f"audio.{name}" if name.startswith("multi_modal_projector") else name
        values = tensor.numpy()
        written = NAMES.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written, name
        if re.search(r"conv\d\.bias", name):
            values = values[:, None]
        if re.search(r"conv2d\d\.bias", name):
            values = values[:, None, None]
        matrix = values.ndim > 1 and "position" not in written and not written.endswith("bias")
        yield written, np.ascontiguousarray(values, np.float16 if matrix else np.float32)


def of_conformer(name: str, values: Array) -> tuple[str, Array]:
    """As llama.cpp's converter writes them."""
    name = name.replace("audio_tower.", "conformer.").replace("embed_", "model.embed_").replace(".linear.", ".")
    if name.endswith("per_dim_scale"):
        name, values = f"{name}.weight", np.log1p(np.exp(values))
    stem, _, kind = name.rpartition(".")
    written = NAMES.get_name(stem)
    assert written, name
    values = values.squeeze(1) if "conv_dw" in written else values.reshape(values.shape or 1)
    return f"{written}.{kind}", np.ascontiguousarray(values, np.float16 if values.ndim > 1 else np.float32)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of encoder and projector, by the names in folders."""
    found = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    return {name: each for name, each in found.items() if not re.search("language_model|lm_head", name)}


def write_folder(folder: Path, golden: Golden) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden.config, indent=1))
    save_file(
        {name: each.half().contiguous() for name, each in state_of(golden.model).items()}, folder / "model.safetensors"
    )
    if golden.extractor is not None:
        golden.extractor.save_pretrained(folder)
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        settings.pop("mel_filters", None)
        (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=1))


def rows_seen(model: Any, count: int, **inputs: Any) -> Array:
    """The rows that the text model gets in place of `count` placeholders."""
    seen: list[torch.Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    ids = torch.full((1, count + 2), PLACEHOLDER)
    ids[0, 0] = ids[0, -1] = 5
    model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
    hook.remove()
    return np.asarray(seen[0][0, 1:-1].numpy())


def extractor(window: int = WINDOW) -> hf.WhisperFeatureExtractor:
    return hf.WhisperFeatureExtractor(feature_size=MELS, chunk_length=window)


def qwen2audio(seed: int) -> Golden:
    config = hf.Qwen2AudioConfig(
        audio_config=AUDIO, text_config=TEXT | {"model_type": "qwen2", "tie_word_embeddings": False},
        audio_token_index=PLACEHOLDER,
    )  # fmt: skip
    model, extract = fill(hf.Qwen2AudioForConditionalGeneration(config), seed), extractor()

    def encode(samples: Array) -> tuple[Array, Array]:
        found = extract(samples, sampling_rate=16000, return_attention_mask=True, return_tensors="pt")
        valid = int(found.attention_mask.sum())
        count = ((valid - 1) // 2 + 1 - 2) // 2 + 1
        rows = rows_seen(model, count, input_features=found.input_features, feature_attention_mask=found.attention_mask)
        return found.input_features[0, :, :valid].numpy(), rows

    return Golden(model, "qwen2a", config.to_dict(), encode, 0, extract)


def voxtral(seed: int) -> Golden:
    window = 2
    audio = {
        "hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_mel_bins": MELS, "max_source_positions": 50 * window,
    }  # fmt: skip
    config = hf.VoxtralConfig(
        audio_config=audio, text_config=TEXT | {"model_type": "llama"}, audio_token_id=PLACEHOLDER,
        hidden_size=TEXT["hidden_size"],
    )  # fmt: skip
    model, extract = fill(hf.VoxtralForConditionalGeneration(config), seed), extractor(window)

    def encode(samples: Array) -> tuple[Array, Array]:
        mel = extract(
            samples, sampling_rate=16000, padding=True, truncation=False, pad_to_multiple_of=16000 * window,
            return_tensors="pt",
        ).input_features  # fmt: skip
        parts = mel.reshape(MELS, -1, 100 * window).transpose(0, 1)
        return mel[0].numpy(), rows_seen(model, mel.shape[2] // 8, input_features=parts)

    return Golden(model, "voxtral", config.to_dict(), encode, 4, extract, {"feed_forward_length": 96})


class Projector(nn.Module):
    """Ultravox's."""

    def __init__(self, stack: int) -> None:
        super().__init__()
        wide, inner = stack * AUDIO["d_model"], 32
        self.ln_pre, self.ln_mid = LlamaRMSNorm(wide), LlamaRMSNorm(inner)
        self.linear_1 = nn.Linear(wide, 2 * inner, bias=False)
        self.linear_2 = nn.Linear(inner, TEXT["hidden_size"], bias=False)
        self.stack = stack

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        whole = nn.functional.pad(states, (0, 0, 0, -states.shape[0] % self.stack))
        value, gate = self.linear_1(self.ln_pre(whole.reshape(-1, self.stack * states.shape[1]))).chunk(2, -1)
        return self.linear_2(self.ln_mid(nn.functional.silu(gate) * value))


class Ultravox(nn.Module):
    def __init__(self, stack: int) -> None:
        super().__init__()
        config = hf.WhisperConfig(**AUDIO, activation_function="gelu")
        self.audio_tower, self.multi_modal_projector = WhisperEncoder(config), Projector(stack)


def ultravox(seed: int) -> Golden:
    stack, extract = 8, extractor()
    model = fill(Ultravox(stack), seed)
    encoder = model.audio_tower
    table, config = encoder.embed_positions.weight.clone(), encoder.config

    def encode(samples: Array) -> tuple[Array, Array]:
        mel = extract(
            samples, sampling_rate=16000, padding="longest", pad_to_multiple_of=160, truncation=False,
            return_tensors="pt",
        ).input_features  # fmt: skip
        rows = []
        for part in mel.split(100 * WINDOW, dim=2):
            count = (part.shape[2] + 1) // 2
            object.__setattr__(config, "max_source_positions", part.shape[2] / 2)  # which it wants to be an int
            encoder.embed_positions = nn.Embedding.from_pretrained(table[:count])
            rows.append(model.multi_modal_projector(encoder(part).last_hidden_state[0]))
        encoder.embed_positions = nn.Embedding.from_pretrained(table)
        object.__setattr__(config, "max_source_positions", len(table))
        return mel[0].numpy(), torch.cat(rows).numpy()

    folder = {
        "architectures": ["UltravoxModel"], "model_type": "ultravox", "audio_config": config.to_dict(),
        "stack_factor": stack, "projector_act": "swiglu", "projector_ln_mid": True, "hidden_size": 32,
        "text_config": TEXT | {"model_type": "llama"},
    }  # fmt: skip
    return Golden(model, "ultravox", folder, encode, stack)


def qwen3asr(seed: int) -> Golden:
    config = hf.Qwen3ASRConfig(
        audio_config=CORE | {"downsample_hidden_size": 6, "output_dim": TEXT["hidden_size"]},
        text_config=TEXT | {"model_type": "qwen3", "tie_word_embeddings": True}, audio_token_id=PLACEHOLDER,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = fill(hf.Qwen3ASRForConditionalGeneration(config), seed)
    extract = hf.Qwen3ASRFeatureExtractor(feature_size=MELS)

    def encode(samples: Array) -> tuple[Array, Array]:
        found = extract(samples, sampling_rate=16000, padding=True, return_attention_mask=True)
        valid = int(found["attention_mask"].sum())
        rows = model.model.get_audio_features(found["input_features"], found["attention_mask"]).pooler_output
        return found["input_features"][0, :, :valid].numpy(), rows.numpy()

    return Golden(model, "qwen3a", config.to_dict(), encode, 0, extract)


def gemma4(seed: int) -> Golden:
    """Two layers, so that a row depends on more than twelve; bounds of all matrices; text layers with inputs of their
    own."""
    audio = {
        "hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "output_proj_dims": 20,
        "subsampling_conv_channels": [128, 2], "use_clipped_linears": True,
    }  # fmt: skip
    text = configurations()["gemma4"].to_dict() | {
        "vocab_size": TEXT["vocab_size"], "vocab_size_per_layer_input": TEXT["vocab_size"], "pad_token_id": 0,
        "hidden_size": TEXT["hidden_size"],
    }  # fmt: skip
    config = hf.Gemma4Config(
        text_config=text, audio_config=audio, audio_token_id=PLACEHOLDER, image_token_id=291, video_token_id=292,
        boa_token_id=263, eoa_token_index=264, tie_word_embeddings=True,
        vision_config=VISION | {
            "num_key_value_heads": 2, "head_dim": 12, "patch_size": 2, "position_embedding_size": 210,
            "pooling_kernel_size": 3,
        },
    )  # fmt: skip
    model = settle(fill(hf.Gemma4ForConditionalGeneration(config), seed), seed).half().float()
    for name, values in model.named_buffers():
        if name.endswith(("_min", "_max")):
            values.fill_(BOUNDS[name.rpartition(".")[2]])
    extract = hf.Gemma4AudioFeatureExtractor()

    def encode(samples: Array) -> tuple[Array, Array]:
        found = extract([samples], sampling_rate=16000, return_tensors="pt")
        valid = int(found["input_features_mask"].sum())
        heard = model.model.get_audio_features(**found, return_dict=True)
        rows = heard.pooler_output[heard.attention_mask]
        return found["input_features"][0, :valid].numpy().T, rows.numpy()

    fields = {"feed_forward_length": 96, "num_mel_bins": 128, "block_count": 2}
    return Golden(model, "gemma4a", config.to_dict(), encode, 0, extract, fields)


def answer_to_one(golden: Golden, renamed: Mapping[str, str]) -> dict[str, Array]:
    """Of a turn with a sound, as `answers` has it."""
    found = golden.extractor(
        [SOUNDS["short"]], sampling_rate=16000, padding=True, return_attention_mask=True, return_tensors="pt"
    )
    mask = found["attention_mask"] if "attention_mask" in found else found["input_features_mask"]
    sound = {"input_features": found["input_features"], "input_features_mask": mask}
    count = len(golden.encode(SOUNDS["short"])[1])
    before, behind, each = renamed.values()
    text = f"<|im_start|>user\nAudio 1: {before}{each * count}{behind}\nWhat is heard?"
    text += "<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([make_tokenizer(renamed).encode(text, add_special_tokens=False).ids])
    said = answered(golden.model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), **sound}, STEPS, padding=0)
    return {f"one.{key}": each for key, each in said.items()}


def text_of(model: Any) -> Any:
    text = hf.Qwen2ForCausalLM(model.config.text_config)
    text.model, text.lm_head = model.model.language_model, model.lm_head
    return text


def answers(golden: Golden) -> dict[str, Array]:
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

    wrapped = hf.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.add_special_tokens({"additional_special_tokens": [*CONTROL, *ADDED]})
    wrapped.padding_side = "left"
    processor = Qwen2AudioProcessor(extractor(), wrapped, chat_template=TEMPLATE)
    sounds = {"short": SOUNDS["short"], "other": chirp(SHORT - 4000, 210.0)}
    found = {}
    for name, turns in CONVERSATIONS.items():
        messages = [
            {"role": role, "content": [
                {"type": "audio", "audio_url": part} if part[0] == "[" else {"type": "text", "text": part}
                for part in parts
            ]}
            for role, *parts in turns
        ]  # fmt: skip
        prompt = wrapped.apply_chat_template(
            messages, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
        )
        heard = [sounds[part[1:-1]] for _, *parts in turns for part in parts if part[0] == "["]
        inputs = processor(text=prompt, audio=heard, return_tensors="pt", sampling_rate=16000)
        said = answered(golden.model, inputs, STEPS, padding=0)
        found |= {f"{name}.{key}": each for key, each in said.items()}
    return found


def make_tokenizer(renamed: Mapping[str, str] = {}) -> Tokenizer:
    tokens = [renamed.get(token, token) for token in TOKENS]
    tokenizer = byte_pairs(tokens)
    special = [*CONTROL, *tokens[len(bytes_vocabulary()) :]]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def write_whole(folder: Path, golden: Golden, renamed: Mapping[str, str] = {}) -> None:
    """The folder that transformers saves, with the text model and its tokenizer."""
    golden.model.half().save_pretrained(folder)
    golden.model.float()
    (folder / "generation_config.json").unlink(missing_ok=True)
    make_tokenizer(renamed).save(str(folder / "tokenizer.json"), pretty=False)
    template = TEMPLATE
    for old, new in renamed.items():
        template = template.replace(old, new)
    template = template.replace("<|audio><|audio|><audio|>", "<|audio|>")  # Gemma's, whose processor adds the others
    settings = {"chat_template": template, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))


FAMILIES = {"qwen2audio": qwen2audio, "ultravox": ultravox, "voxtral": voxtral, "qwen3asr": qwen3asr, "gemma4": gemma4}

if __name__ == "__main__":
    run(main)
