"""How much the rows of an encoder of pictures change with the type of its matrices.

    python benchmarks/tower_types.py mmproj.gguf [--picture photo.jpg] [--types Q8_0 Q5_0 Q4_0]

Each type is what `edge convert mmproj.gguf small.gguf --type TYPE` writes. Rows are the projected ones, by the
reference engine in float32, so that nothing but the weights differs: the root mean square of the difference over that
of the file's own rows, and the least cosine between two rows.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from edge.backends import engine_named
from edge.budget import format_bytes
from edge.converters.convert import Conversion, convert
from edge.converters.gguf.quantize import Settings
from edge.formats.gguf import read_gguf
from edge.lab.report.document import table
from edge.media.picture import Image
from edge.model.towers import read_tower
from edge.run.senses.sight import Encoder

TYPES = ("Q8_0", "Q6_K", "Q5_1", "Q5_0", "Q4_1", "Q4_K", "Q4_0", "IQ4_NL")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("mmproj", type=Path)
    options.add_argument("--picture", type=Path, help="default: drawn shapes, 512 × 512")
    options.add_argument("--types", nargs="+", default=TYPES)
    options.add_argument("--threads", type=int, default=1)
    chosen = options.parse_args()
    picture = Image(chosen.picture) if chosen.picture else Image(drawn())
    expected, lines = rows_of(chosen.mmproj, picture, chosen.threads), list[list[str]]()
    for kind in chosen.types:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "small.gguf"
            convert(chosen.mmproj, target, Conversion("gguf", settings=Settings(kind, method="rtn")))
            found, size = rows_of(target, picture, chosen.threads), target.stat().st_size
        off = np.sqrt(np.mean(np.square(found - expected)) / np.mean(np.square(expected)))
        cosines = (found * expected).sum(1) / (np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1))
        lines.append([kind, format_bytes(size), f"{off:.1%}", f"{cosines.min():.4f}"])
        print(*lines[-1], flush=True)
    size = chosen.mmproj.stat().st_size
    print(f"{len(expected)} rows of {picture.width} × {picture.height}; the file has {format_bytes(size)}")
    print(table(["type", "size", "rows differ by", "least cosine"], lines))


def rows_of(mmproj: Path, picture: Image, threads: int) -> Any:
    """The rows of all parts, float32 [n, width]."""
    tower: Any = read_tower(read_gguf(mmproj))
    encoder = Encoder(tower, engine_named("reference"), threads)
    return np.concatenate(encoder.encode(picture.pixels, tower.layout(picture.width, picture.height, tower.sizes[0])))


def drawn() -> Any:
    """Shapes and noise, uint8 [512, 512, 3]."""
    rows, columns = np.mgrid[:512, :512]
    found = np.stack([rows // 2, columns // 2, (rows + columns) // 4], axis=2).astype(np.uint8)
    found[(rows - 150) ** 2 + (columns - 180) ** 2 < 90**2] = (220, 40, 30)
    found[300:450, 280:470] = np.random.default_rng(1).integers(0, 256, (150, 190, 3))
    return found


if __name__ == "__main__":
    main()
