"""Adapters as PEFT saves them, and what it answers with them.

`python tests/model/peft_adapters.py`, with PEFT and transformers, writes golden/peft/KIND: random adapters of
folders/llama; and golden/peft/logits.npz: for each kind, logits [8, vocab] in float32 after the last of TOKENS.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden"
OUT = GOLDEN / "peft"
TOKENS = np.random.default_rng(3).integers(3, 200, 12).astype(np.int32)
LAST = 8
KINDS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora", "use_rslora": True},
    "patterns": {
        "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 3, "down_proj": 1},
        "alpha_pattern": {r"layers\.1\..*": 9, "down_proj": 4},
        "use_rslora": True,
    },
}


def main() -> None:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(GOLDEN / "folders" / "llama", dtype=torch.float32)

    torch.set_grad_enabled(False)
    shutil.rmtree(OUT, ignore_errors=True)
    found = {}
    for kind, said in KINDS.items():
        torch.manual_seed(5)
        model = get_peft_model(base(), LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", **said))
        for name, values in model.named_parameters():
            if "lora_" in name:
                values.add_(torch.randn(values.shape) * values.abs().mean().clamp(min=0.1) * 0.3)
        model.peft_config["default"].base_model_name_or_path = "llama"
        model.save_pretrained(OUT / kind)
        (OUT / kind / "README.md").unlink(missing_ok=True)
        again = PeftModel.from_pretrained(base(), OUT / kind).eval()
        found[kind] = again(torch.from_numpy(TOKENS).long()[None]).logits[0, -LAST:].numpy()
    np.savez_compressed(OUT / "logits.npz", **found)


if __name__ == "__main__":
    main()
