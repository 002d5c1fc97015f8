"""Adapters as PEFT saves them, and what it answers with them.

`python tests/model/adapters/peft_adapters.py [KIND …]`, with PEFT and transformers, writes golden/peft/KIND: random
adapters of folders/llama and others; and golden/peft/logits.npz: for each kind, logits [8, vocab] in float32 after the
last of TOKENS.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[2] / "golden"
OUT = GOLDEN / "peft"
TOKENS = np.random.default_rng(3).integers(3, 200, 12).astype(np.int32)
LAST = 8
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


def pool(model: Any) -> None:
    """Give every adapted layer PEFT's QA-LoRA, with averages of 16 inputs."""
    import torch
    from peft.tuners.lora.variants import QALoraLinearVariant

    for module in model.modules():
        if getattr(module, "lora_A", None):
            module.qalora_group_size = {"default": 16}
            module.lora_A["default"] = torch.nn.Linear(module.in_features // 16, 2, bias=False)
            module.lora_variant["default"] = QALoraLinearVariant()


def main() -> None:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    def base(kind: str) -> Any:
        folder = GOLDEN / "folders" / FOLDER.get(kind, "llama")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    torch.set_grad_enabled(False)
    with np.load(OUT / "logits.npz") as known:
        found = dict(known)
    for kind in sys.argv[1:] or KINDS:
        said = {"target_modules": "all-linear", **KINDS[kind]}
        torch.manual_seed(5)
        shutil.rmtree(OUT / kind, ignore_errors=True)
        model = get_peft_model(base(kind), LoraConfig(r=2, lora_alpha=6, **said))
        if kind == "qalora":
            pool(model)
        for name, values in model.named_parameters():
            if "lora_" in name:
                values.add_(torch.randn(values.shape) * values.abs().mean().clamp(min=0.1) * 0.3)
        model.peft_config["default"].base_model_name_or_path = FOLDER.get(kind, "llama")
        model.save_pretrained(OUT / kind)
        (OUT / kind / "README.md").unlink(missing_ok=True)
        again = model.eval() if kind == "qalora" else PeftModel.from_pretrained(base(kind), OUT / kind).eval()
        if kind == "qalora":
            path = OUT / kind / "adapter_config.json"
            said = json.loads(path.read_text()) | {"use_qalora": True, "qalora_group_size": 16}
            path.write_text(json.dumps(said, indent=2, sort_keys=True))
        found[kind] = again(torch.from_numpy(TOKENS).long()[None]).logits[0, -LAST:].numpy()
    np.savez_compressed(OUT / "logits.npz", **found)


if __name__ == "__main__":
    main()
