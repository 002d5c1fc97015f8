"""Adapters and soft prompts as PEFT saves them, and what it answers with them.

`python tests/model/adapters/peft_adapters.py [KIND …]`, with PEFT and transformers, writes golden/peft/KIND, random
adapters, and golden/prefix/KIND, random prompts, of models in golden/folders; and logits.npz beside them: for each
kind, logits [8, vocab] in float32 after the last of TOKENS.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[2] / "golden"
OUT, PREFIXES = GOLDEN / "peft", GOLDEN / "prefix"
TOKENS, AFTER_PREFIX = (np.random.default_rng(seed).integers(3, 200, 12).astype(np.int32) for seed in (3, 4))
LAST, VIRTUAL = 8, 5
FOLDER = {"gemma4": "gemma4_text", "gemma4-whole": "gemma4_text"}  # of a kind's model; llama for the others
_IN_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "per_layer_input_gate",
              "per_layer_projection"]  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora", "use_rslora": True},
    "patterns": {
        "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 3, "down_proj": 1},
        "alpha_pattern": {r"layers\.1\..*": 9, "down_proj": 4},
        "use_rslora": True,
    },
    "qalora": {},  # as if layers were GPTQ's, which are PEFT's only ones with QA-LoRA
    "gemma4": {"target_modules": _IN_LAYERS},
    "gemma4-whole": {},  # also the projection outside of layers
}
PREFIX_KINDS = {  # the model's folder, and PEFT's method
    "prompt": ("llama", "PromptTuningConfig"),
    "p-tuning": ("llama", "PromptEncoderConfig"),
    "prefix": ("llama", "PrefixTuningConfig"),
    "cartridge": ("llama", "CartridgeConfig"),
    "prefix-halves": ("qwen3", "PrefixTuningConfig"),  # RoPE pairs halves of a head in the file, too
    "prefix-positions": ("gpt2", "PrefixTuningConfig"),  # learned positions, and heads with keys of their own
    "prompt-scaled": ("granite", "PromptTuningConfig"),  # transformers scales given rows like embeddings
    "prompt-unscaled": ("gemma3_text", "PromptTuningConfig"),  # not these
}


def pool(model: Any) -> None:
    """Give every adapted layer PEFT's QA-LoRA, with averages of 16 inputs."""
    import torch
    from peft.tuners.lora.variants import QALoraLinearVariant

    for module in model.modules():
        if getattr(module, "lora_A", None):
            module.qalora_group_size = {"default": 16}
            module.lora_A["default"] = torch.nn.Linear(module.in_features // 16, 2, bias=False)
            module.lora_variant["default"] = QALoraLinearVariant()


def written(folder: str, out: Path, seed: int, config: Any, change: Callable[[Any], None]) -> Any:
    """Save a model of golden/folders with what PEFT adds, which `change` draws; returns it."""
    import torch
    from peft import get_peft_model

    torch.manual_seed(seed)
    shutil.rmtree(out, ignore_errors=True)
    model = get_peft_model(base(folder), config)
    change(model)
    model.peft_config["default"].base_model_name_or_path = folder
    model.save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)
    return model


def base(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(GOLDEN / "folders" / folder, dtype=torch.float32)


def main() -> None:
    import peft
    import torch

    torch.set_grad_enabled(False)

    def draw(model: Any) -> None:
        for name, values in model.named_parameters():
            if "lora_" in name:
                values.add_(torch.randn(values.shape) * values.abs().mean().clamp(min=0.1) * 0.3)
            elif "prompt_encoder" in name and "embedding" in name:
                wide = isinstance(model.peft_config["default"], peft.PrefixTuningConfig | peft.CartridgeConfig)
                values.copy_(torch.randn(values.shape) * (1.0 if wide else 0.3))

    def draw_pooled(model: Any) -> None:
        pool(model)
        draw(model)

    found = {out: dict(np.load(out / "logits.npz")) for out in (OUT, PREFIXES)}
    for kind in sys.argv[1:] or (*KINDS, *PREFIX_KINDS):
        if kind in KINDS:
            config = peft.LoraConfig(r=2, lora_alpha=6, **{"target_modules": "all-linear", **KINDS[kind]})
            out, folder, seed, tokens = OUT, FOLDER.get(kind, "llama"), 5, TOKENS
        else:
            folder, method = PREFIX_KINDS[kind]
            config = getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL)
            out, seed, tokens = PREFIXES, 6, AFTER_PREFIX
        model = written(folder, out / kind, seed, config, draw_pooled if kind == "qalora" else draw)
        if kind == "qalora":
            path = out / kind / "adapter_config.json"
            said = json.loads(path.read_text()) | {"use_qalora": True, "qalora_group_size": 16}
            path.write_text(json.dumps(said, indent=2, sort_keys=True))
        else:
            model = peft.PeftModel.from_pretrained(base(folder), out / kind)
        ids = torch.from_numpy(tokens).long()[None]
        found[out][kind] = model.eval()(ids, attention_mask=torch.ones_like(ids)).logits[0, -LAST:].numpy()
    for out, logits in found.items():
        np.savez_compressed(out / "logits.npz", **logits)


if __name__ == "__main__":
    main()
