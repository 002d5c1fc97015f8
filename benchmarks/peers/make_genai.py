"""An int4 model of a GGUF file by onnxruntime-genai's own builder: make_genai.py SOURCE TARGET.

Through a Hugging Face folder with the same weights, dequantized: the builder rounds them to 4 bits again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main(source: Path, target: Path) -> None:
    floats = target / "hf"
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    said = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**said)).float()  # one that does not know that it was quantized
    model.load_state_dict(read.state_dict())
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(floats)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(floats)
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    options = ["-i", floats, "-o", target / "int4", "-p", "int4", "-e", "cpu", "-c", target / "cache"]
    subprocess.run([str(word) for word in [*builder, *options]], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
