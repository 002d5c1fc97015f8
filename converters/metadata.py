"""A GGUF file without weights: a model's hyperparameters, tokenizer and chat template, for our own readers."""

from __future__ import annotations

import struct
from pathlib import Path

from edge.gguf_file import GGUFFile

_MAGIC, _VERSION = b"GGUF", 3
_ALIGNMENT = 32
_FACTORS = "rope_"  # small tensors that say how RoPE turns


def write_metadata(file: GGUFFile, target: Path) -> None:
    """Copy the header's metadata as it is, and RoPE's factors. Raises OSError."""
    kept = [info for name, info in file.tensors.items() if name.startswith(_FACTORS)]
    alignment = int(file.metadata.get("general.alignment", _ALIGNMENT))
    with open(file.path, "rb") as source:
        fields = source.read(file.metadata_end)
    described, at = b"", 0
    for info in kept:
        name = info.name.encode()
        described += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(info.shape))
        described += struct.pack(f"<{len(info.shape)}Q", *info.shape) + struct.pack("<IQ", info.type_id, at)
        at += -(-info.nbytes // alignment) * alignment
    header = struct.pack("<4sIQQ", _MAGIC, _VERSION, len(kept), len(file.metadata)) + fields[24:] + described
    with open(target, "wb") as out:
        out.write(header + bytes(-len(header) % alignment))
        for info in kept:
            data = file.tensor_bytes(info).tobytes()
            out.write(data + bytes(-len(data) % alignment))
