"""Checkpoints of the Hub as GGUF files: the files of a safetensors repository are downloaded, then converted."""

from __future__ import annotations

import hashlib
from pathlib import Path

from edge.converters.gguf.plain import write_plain
from edge.converters.huggingface.architectures import of_config
from edge.converters.huggingface.config import read_config
from edge.converters.huggingface.eagle import convert_eagle, is_eagle_folder
from edge.converters.huggingface.reader import convert_folder
from edge.devices.output import work_folder
from edge.errors import InputError, UnsupportedError
from edge.formats.blocks import PLAIN
from edge.formats.gguf import read_gguf
from edge.hub.cache import pointer_of
from edge.hub.download import Notice, OnBytes, download_each
from edge.hub.repository import RemoteFile, Repository, look_up
from edge.model.model import open_model
from edge.model.names.catalog import hub_reference
from edge.storage import cache

_CONFIG = "config.json"
_TEXTS = (
    _CONFIG, "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "model.safetensors.index.json",
    "modules.json", "1_Pooling/config.json",  # of encoders
    "hf_quant_config.json",  # of modelopt
)  # fmt: skip


def pull_checkpoint(
    name: str, kind: str, *, base: Path | None = None, progress: OnBytes = lambda done, total: None,
    notice: Notice = lambda line: None,
) -> Path:  # fmt: skip
    """Download a repository's checkpoint, convert it to a GGUF file in edge's cache folder, and return its path.

    kind: the type of its matrices, one of PLAIN. base: the GGUF file of the model that an EAGLE-3 head drafts for.
    Memory holds one tensor at a time. progress, notice: as in `edge.pulling.pull`. Raises DownloadError,
    CacheError, InputError, ModelFormatError, UnsupportedError.
    """
    if kind.upper() not in PLAIN:
        raise InputError(f"--convert={kind}: choose {', '.join(PLAIN)}")
    reference = hub_reference(name)
    if reference is None or reference.quant or reference.file:
        raise InputError(f"--convert takes a repository of the Hub, USER/REPO, and not {name[:200]!r}")
    repository = look_up(reference)
    files = _files(repository)
    beside = [] if base is None else [base.name]
    digest = "\n".join([kind.upper(), repository.name, *beside, *(each.hash for each in files)])
    key = hashlib.sha256(digest.encode()).hexdigest()
    if found := cache.find("models", key, ".gguf"):
        return found
    folder = pointer_of(repository, files[0]).parent
    for path in download_each(repository, files, progress=progress, notice=notice):
        if path == folder / _CONFIG and not (base and is_eagle_folder(folder)):
            of_config(read_config(path.parent))  # refuses what cannot be converted before weights are downloaded
    notice(f"converting {repository.name} to {kind.upper()}")

    def write(target: Path) -> None:
        if base and is_eagle_folder(folder):
            convert_eagle(folder, open_model(base), target, kind.upper(), repository.name.partition("/")[2])
            return
        with work_folder(target) as work:
            convert_folder(folder, work / "read.gguf", name=repository.name.partition("/")[2])
            write_plain(read_gguf(work / "read.gguf"), target, kind.upper())

    return cache.find_or_make("models", key, ".gguf", write, about=f"{repository.name} as {kind.upper()}")


def _files(repository: Repository) -> list[RemoteFile]:
    """The checkpoint's files, config.json first, weights last. Raises UnsupportedError without weights or config."""
    by_path = {file.path: file for file in repository.files}
    texts = [by_path[path] for path in _TEXTS if path in by_path]
    weights = [file for path, file in sorted(by_path.items()) if path.endswith(".safetensors") and "/" not in path]
    if "model.safetensors.index.json" in by_path:
        weights = [file for file in weights if file.path.startswith("model")]
    elif "model.safetensors" in by_path:
        weights = [by_path["model.safetensors"]]
    if not weights or _CONFIG not in by_path:
        raise UnsupportedError(f"{repository.name} has no checkpoint in safetensors with a {_CONFIG}")
    return texts + weights
