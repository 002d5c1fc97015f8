"""What sentence-transformers adds to a model: how its states are pooled, dense layers behind that, and prompts.

modules.json lists the folders: 1_Pooling, 2_Dense and so on; config_sentence_transformers.json has the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edge.converters.huggingface.checkpoint import read_checkpoint
from edge.converters.huggingface.views import Tensors
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf_writer import Field
from edge.formats.json_file import read_list, read_object
from edge.model.architectures.common import POOLING
from edge.model.model import DEFAULT_PROMPT, PROMPTS
from edge.model.structure.layers import DENSE
from edge.values import brief

_MODULES, _PROMPTS = "modules.json", "config_sentence_transformers.json"
_POOLING_MODES = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
_KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
_LINEAR = {"linear.weight": "weight", "linear.bias": "bias"}


def pooling_fields(folder: Path) -> dict[str, Field]:
    """The pooling of sentence-transformers' modules; nothing without them. Raises UnsupportedError,
    ModelFormatError."""
    path = next((each for kind, each in _modules(folder) if kind == "Pooling"), folder / "1_Pooling") / "config.json"
    if not path.is_file():
        return {}
    said = read_object(path)
    modes = [key.removeprefix("pooling_mode_") for key, on in said.items() if key.startswith("pooling_mode_") and on]
    found = _POOLING_MODES.get(modes[0]) if len(modes) == 1 else said.get("pooling_mode") if not modes else None
    numbers = {name: number for number, name in POOLING.items()}
    if not isinstance(found, str) or found not in numbers:
        raise UnsupportedError(f"{path}: its pooling is not supported ({', '.join(modes) or brief(found)})")
    return {"pooling_type": np.uint32(numbers[found])}


def dense_layers(folder: Path) -> tuple[Tensors, dict[str, Field]]:
    """The tensors of dense layers behind the pooling, by GGUF's names, and their sizes. Raises UnsupportedError,
    ModelFormatError."""
    found: Tensors = {}
    fields: dict[str, Field] = {}
    dense = [path for kind, path in _modules(folder) if kind == "Dense"]
    if len(dense) > len(DENSE):
        raise UnsupportedError(f"{folder / _MODULES}: {len(dense)} dense layers: GGUF has names for {len(DENSE)}")
    for name, path in zip(DENSE, dense, strict=False):
        config = path / "config.json"
        activation = str(read_object(config).get("activation_function")).rpartition(".")[2]
        if activation != "Identity":
            raise UnsupportedError(f"{config}: its activation {activation:.80} is not supported")
        for theirs, tensor in read_checkpoint(path).items():
            if theirs not in _LINEAR or len(tensor.shape) != 1 + (theirs == "linear.weight"):
                raise ModelFormatError(f"{path}: {theirs!r:.80} is no tensor of a dense layer")
            found[f"{name}.{_LINEAR[theirs]}"] = tensor
            if len(tensor.shape) > 1:
                fields |= {
                    f"{name}_feat_out": np.uint32(tensor.shape[0]),
                    f"{name}_feat_in": np.uint32(tensor.shape[1]),
                }
    return found, fields


def prompt_fields(folder: Path) -> dict[str, Field]:
    """Texts that stand before texts to embed, by name. Raises ModelFormatError."""
    path = folder / _PROMPTS
    said = read_object(path) if path.is_file() else {}
    prompts = said.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelFormatError(f"{path}: its prompts are {brief(prompts)}, no texts by name")
    fields: dict[str, Field] = {f"{PROMPTS}{name}": text for name, text in prompts.items() if text}
    default = said.get("default_prompt_name")
    return fields | ({DEFAULT_PROMPT: default} if isinstance(default, str) and default in prompts else {})


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """The kinds and folders of the modules. Raises UnsupportedError for other kinds, ModelFormatError."""
    path = folder / _MODULES
    for module in read_list(path) if path.is_file() else []:
        kind, place = (module.get(key) if isinstance(module, dict) else None for key in ("type", "path"))
        name, where = str(kind).rpartition(".")[2], str(place)
        if name not in _KINDS:
            raise UnsupportedError(f"{path}: the module {brief(kind)} behind the model is not supported")
        if Path(where).name != where or where == ".." or "\0" in where:
            raise ModelFormatError(f"{path}: {where!r:.80} is not the name of a folder in this one")
        yield name, folder / where
