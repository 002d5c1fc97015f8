"""llama.cpp's converter and quantizer: llama_converter.py KIND FOLDER TARGET PYTHON SOURCES.

KIND: `gguf` (the folder's own floats) or `q4_0`. PYTHON has torch and transformers; SOURCES are llama.cpp's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from edge.converters.gguf.ggml import quantize_with_llamacpp


def main(kind: str, folder: Path, target: Path, python: str, sources: Path) -> None:
    floats = target if kind == "gguf" else target.with_name(f"{target.name}.floats.gguf")
    theirs = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [python, sources / "convert_hf_to_gguf.py", folder, "--outfile", floats, "--outtype", "bf16"]
    subprocess.run([str(word) for word in command], check=True, env={**theirs, "PYTHONPATH": str(sources / "gguf-py")})
    if kind == "q4_0":
        quantize_with_llamacpp(floats, target, "Q4_0")
        floats.unlink()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
