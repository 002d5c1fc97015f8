"""Soft prompts as PEFT saves them, and what it answers behind them.

`python tests/model/adapters/peft_prefixes.py`, with PEFT and transformers, writes golden/prefix/KIND: random prompts of
models in golden/folders; and golden/prefix/logits.npz: for each, logits [8, vocab] in float32 after the last of TOKENS.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[2] / "golden"
OUT = GOLDEN / "prefix"
TOKENS = np.random.default_rng(4).integers(3, 200, 12).astype(np.int32)
LAST, VIRTUAL = 8, 5
KINDS = {  # the model's folder, and PEFT's method
    "prompt": ("llama", "PROMPT_TUNING"),
    "p-tuning": ("llama", "P_TUNING"),
    "prefix": ("llama", "PREFIX_TUNING"),
    "cartridge": ("llama", "CARTRIDGE"),
    "prefix-halves": ("qwen3", "PREFIX_TUNING"),  # RoPE pairs halves of a head in the file, too
    "prefix-positions": ("gpt2", "PREFIX_TUNING"),  # learned positions, and heads with keys of their own
    "prompt-scaled": ("granite", "PROMPT_TUNING"),  # transformers scales given rows like embeddings
    "prompt-unscaled": ("gemma3_text", "PROMPT_TUNING"),  # not these
}


def main() -> None:
    import torch
    from peft import (
        CartridgeConfig,
        PeftModel,
        PrefixTuningConfig,
        PromptEncoderConfig,
        PromptTuningConfig,
        get_peft_model,
    )
    from transformers import AutoModelForCausalLM

    def base(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(GOLDEN / "folders" / folder, dtype=torch.float32)

    configs = {
        "PROMPT_TUNING": PromptTuningConfig, "P_TUNING": PromptEncoderConfig, "PREFIX_TUNING": PrefixTuningConfig,
        "CARTRIDGE": CartridgeConfig,
    }  # fmt: skip
    torch.set_grad_enabled(False)
    shutil.rmtree(OUT, ignore_errors=True)
    found = {}
    for kind, (folder, method) in KINDS.items():
        torch.manual_seed(6)
        model = get_peft_model(base(folder), configs[method](task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL))
        for name, values in model.named_parameters():
            if "prompt_encoder" in name and "embedding" in name:
                values.copy_(torch.randn(values.shape) * (1.0 if method in ("PREFIX_TUNING", "CARTRIDGE") else 0.3))
        model.peft_config["default"].base_model_name_or_path = folder
        model.save_pretrained(OUT / kind)
        (OUT / kind / "README.md").unlink(missing_ok=True)
        again = PeftModel.from_pretrained(base(folder), OUT / kind).eval()
        tokens = torch.from_numpy(TOKENS).long()[None]
        found[kind] = again(tokens, attention_mask=torch.ones_like(tokens)).logits[0, -LAST:].numpy()
    np.savez_compressed(OUT / "logits.npz", **found)


if __name__ == "__main__":
    main()
