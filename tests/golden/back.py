"""Convert the golden folders to GGUF and back, into a folder, for `check.py` to load them.

Run it with edge installed, as `make golden` does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edge.converters.huggingface.reader import convert_folder
from edge.converters.huggingface.writer import write_folder
from edge.model.model import open_model


def main(out: Path) -> None:
    for folder in sorted((Path(__file__).parent / "folders").iterdir()):
        if folder.is_dir():
            convert_folder(folder, out / f"{folder.name}.gguf")
            model = open_model(out / f"{folder.name}.gguf")
            write_folder(model.file, model.spec, out / folder.name, force=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
