"""edge's converters in a process of their own: edge_converter.py KIND FOLDER TARGET.

KIND: `gguf` (the folder's own floats), `q4_0` (rounded, the head to 8 bits), `onnx` (every matrix in 4 bits).
"""

from __future__ import annotations

import sys
from pathlib import Path

from edge.converters.gguf.plain import write_plain
from edge.converters.huggingface.reader import convert_folder
from edge.converters.onnx.writer import write_onnx
from edge.formats.gguf import read_gguf
from edge.model.reader import read_spec


def main(kind: str, folder: Path, target: Path) -> None:
    if kind == "gguf":
        convert_folder(folder, target)
        return
    floats = target.with_name(f"{target.name}.floats.gguf")
    rounded = target if kind == "q4_0" else target.with_name(f"{target.name}.q4_0.gguf")
    convert_folder(folder, floats)
    write_plain(read_gguf(floats), rounded, "Q4_0", pure=kind == "onnx")
    floats.unlink()
    if kind == "onnx":
        file = read_gguf(rounded)
        write_onnx(file, read_spec(file), target)
        rounded.unlink()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
