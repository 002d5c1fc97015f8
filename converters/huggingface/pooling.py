"""How sentence-transformers pools a model's states: modules.json and 1_Pooling/config.json, as a GGUF field."""

from __future__ import annotations

from pathlib import Path
from reprlib import repr as brief

import numpy as np

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf_writer import Field
from edge.formats.json_file import read_list, read_object
from edge.model.architectures.common import POOLING

_MODULES, _POOLING_MODES = "modules.json", {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}


def pooling_fields(folder: Path) -> dict[str, Field]:
    """The pooling of sentence-transformers' modules; nothing without them. Raises UnsupportedError,
    ModelFormatError."""
    path, where = folder / _MODULES, "1_Pooling"
    if path.is_file():
        for module in read_list(path):
            kind, place = (module.get(key) if isinstance(module, dict) else None for key in ("type", "path"))
            name = str(kind).rpartition(".")[2]
            if name not in ("Transformer", "Pooling", "Normalize"):
                raise UnsupportedError(f"{path}: the module {brief(kind)} behind the model is not supported")
            if name == "Pooling":
                where = str(place)
    if Path(where).name != where:
        raise ModelFormatError(f"{path}: {where!r:.80} is not the name of a folder in this one")
    path = folder / where / "config.json"
    if not path.is_file():
        return {}
    said = read_object(path)
    modes = [key.removeprefix("pooling_mode_") for key, on in said.items() if key.startswith("pooling_mode_") and on]
    found = _POOLING_MODES.get(modes[0]) if len(modes) == 1 else said.get("pooling_mode") if not modes else None
    numbers = {name: number for number, name in POOLING.items()}
    if found not in numbers:
        raise UnsupportedError(f"{path}: its pooling is not supported ({', '.join(modes) or brief(found)})")
    return {"pooling_type": np.uint32(numbers[found])}
