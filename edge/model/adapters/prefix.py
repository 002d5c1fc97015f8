"""Soft prompts that PEFT trained, before every prompt.

Prompt tuning (arXiv:2104.08691) and P-tuning (arXiv:2103.10385) have rows in place of embeddings, [tokens, hidden];
prefix tuning (arXiv:2101.00190) has keys and values, [tokens, 2 · layers · KV heads · head size], as a cache holds them
after RoPE, as has a cartridge (arXiv:2506.06266), which was trained on a document. As in PEFT, they stand before BOS at
positions 0 … n − 1, keys are not rotated again, and a text begins at position n.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.json_file import read_object
from edge.formats.safetensors import Planned, Stored, read_header, read_whole_header, write_safetensors
from edge.model.cores import RowShape
from edge.model.parts.given import GivenRows, content_ids, interleaved
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.records import dataclass
from edge.storage.fingerprint import fingerprint
from edge.types import FloatArray, IntArray
from edge.values import brief

_CONFIG, _WEIGHTS, _TENSOR = "adapter_config.json", "adapter_model.safetensors", "prompt_embeddings"
_OF_ROWS, _OF_KEYS = ("PROMPT_TUNING", "P_TUNING"), ("PREFIX_TUNING", "CARTRIDGE")
SOFT_PROMPTS = (*_OF_ROWS, *_OF_KEYS)
"""PEFT's names of the methods whose folders `read_prefix` reads."""
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
INTERLEAVED = ("llama", "granite", "mistral3", "smollm3", "minicpm", "arcee")
"""Architectures whose GGUF files have RoPE's pairs as neighbours in a key, and transformers as halves."""
_SCALES_INPUTS = ("granite", "granitehybrid")  # transformers scales given rows, too; of other models, they come scaled
_SHORTEST_NAME = 4  # letters and digits of a base model's name that say which model it is

_NAMED = "a folder that PEFT saved, or the file that edge convert makes of it"

_log = logging.getLogger("edge")


@dataclass(frozen=True)
class PrefixFile:
    """A prefix with its header checked. keys: it has keys and values; else rows."""

    tensor: Stored
    keys: bool
    base: str  # the name of the model that it was trained for; empty if unknown

    @property
    def size(self) -> int:
        """The number of its rows."""
        return self.tensor.shape[0]

    @property
    def name(self) -> str:
        path = self.tensor.path.resolve()
        return path.parent.name if path.name == _WEIGHTS else path.stem

    @cached_property
    def sha256(self) -> str:
        """Of the file of tensors."""
        return fingerprint(self.tensor.path).sha256

    @property
    def nbytes(self) -> int:
        """Bytes of the table in memory, float32."""
        return 4 * self.size * self.tensor.shape[1]

    def check_model(self, spec: ModelSpec) -> None:
        """Raise InputError if it belongs to another model, UnsupportedError for a model that cannot have it."""
        if spec.encoder:
            raise UnsupportedError("--prefix is for models that generate, and this is an encoder")
        width = spec.layers * row_of(spec).values if self.keys else spec.hidden
        if self.tensor.shape[1] != width:
            raise InputError(
                f"{self.tensor.path}: rows of {self.tensor.shape[1]} values, and this model takes {width}: it belongs "
                "to another model"
            )

    def open(self, spec: ModelSpec) -> Prefix:
        """Read the rows, and warn if another model's name is in its config. Raises ModelFormatError, and the errors of
        `check_model`."""
        self.check_model(spec)
        names = [_letters(name) for name in (spec.name, self.base)]
        if min(map(len, names)) >= _SHORTEST_NAME and names[0] not in names[1] and names[1] not in names[0]:
            _log.warning(
                "--prefix was trained for %s, and this file names its model %s: in another model the rows mean nothing",
                self.base, spec.name,
            )  # fmt: skip
        stored = self.tensor.read()
        bits = stored.astype(np.uint32) << 16 if self.tensor.dtype == "BF16" else stored
        table: FloatArray = bits.view(np.float32) if self.tensor.dtype == "BF16" else bits.astype(np.float32)
        if not np.isfinite(table).all():
            raise ModelFormatError(f"{self.tensor.path}: {_TENSOR} has values that are not finite")
        given = GivenRows.of(spec)
        if self.keys:
            row = row_of(spec)
            rows = table.reshape(self.size, spec.layers, 2, row.heads, row.key).transpose(2, 1, 3, 0, 4).copy()
            if spec.architecture in INTERLEAVED:
                rows[0] = interleaved(rows[0], row.key)
            return Prefix(self, content_ids(table, spec.vocab), given, rows)
        if spec.architecture in _SCALES_INPUTS:
            table = table * np.float32(find_network(spec).embedding_scale)
        return Prefix(self, given.add(table), given, np.zeros((2, 0, 0, 0, 0), np.float32))


@dataclass(frozen=True)
class Prefix:
    """The beginning of every sequence: ids beyond the vocabulary, int32 [n], and what stands for them.

    given: rows. rows: keys and values, float32 [2, layers, KV heads, n, head], in the order of the model's file; empty
    for a prefix of rows.
    """

    file: PrefixFile
    ids: IntArray
    given: GivenRows
    rows: FloatArray

    @cached_property
    def saved(self) -> int:
        """The number of ids whose keys and values are known."""
        return int(self.rows.shape[3])


def read_prefix(path: Path) -> PrefixFile:
    """Read the header of a PEFT folder, of the file of tensors in it, or of a file that `edge convert` made of both.

    Raises InputError for a path without a prefix, ModelFormatError for a damaged one, UnsupportedError for other
    methods.
    """
    if not path.exists():
        raise InputError(f"--prefix {path}: no such file or folder")
    folder = path if path.is_dir() else path.parent
    config, weights = folder / _CONFIG, path / _WEIGHTS if path.is_dir() else path
    if path.is_file() and path.name not in (_CONFIG, _WEIGHTS):
        facts = read_whole_header(path)[1] if path.suffix == ".safetensors" else {}
        if "peft_type" not in facts:
            raise InputError(f"--prefix {path} is no soft prompt: name {_NAMED}")
        return _checked(path, path, facts)
    if not config.is_file() or not weights.is_file() or weights == config:
        lacking = _WEIGHTS if config.is_file() else _CONFIG
        raise InputError(f"--prefix {path}: there is no {lacking}: name {_NAMED}")
    return _checked(config, weights, read_object(config))


def write_prefix(folder: Path, target: Path, spec: ModelSpec) -> None:
    """Write a PEFT folder's prefix of a model as one file, atomically, with what its config says as metadata. Raises
    what `read_prefix` and `check_model` raise."""
    from edge.devices.output import new_file  # here: runs only read

    found, method = read_prefix(folder), str(read_object(folder / _CONFIG)["peft_type"])
    found.check_model(spec)
    if target.suffix != ".safetensors":
        raise InputError(f"{folder} is a soft prompt, which becomes a .safetensors file: not {target.name}")
    facts = {"peft_type": method, "base_model_name_or_path": found.base}
    with new_file(target) as temporary:
        planned = Planned(_TENSOR, found.tensor.dtype, found.tensor.shape)
        write_safetensors(temporary, [planned], [found.tensor.read()], facts=facts)
        read_prefix(temporary).open(spec)


def _checked(config: Path, weights: Path, said: Mapping[str, Any]) -> PrefixFile:
    """config: that says this."""
    path = weights.parent if weights.name == _WEIGHTS else weights
    method, base = said.get("peft_type"), said.get("base_model_name_or_path")
    if method == "LORA":
        raise InputError(f"--prefix {path} is a LoRA adapter: edge convert makes a file for --lora of it")
    if method not in SOFT_PROMPTS or said.get("num_transformer_submodules") not in (None, 1):
        raise UnsupportedError(f"{config}: peft_type is {brief(method)}: edge runs {', '.join(SOFT_PROMPTS)}")
    tensors = read_header(weights)
    tensor = tensors.get(_TENSOR)
    if tensor is None or len(tensors) != 1:
        raise ModelFormatError(f"{weights}: {_TENSOR} should be its only tensor: the file is damaged")
    if len(tensor.shape) != 2 or not all(tensor.shape) or tensor.dtype not in _DTYPES:
        raise ModelFormatError(f"{weights}: {_TENSOR} is {tensor.dtype} {list(tensor.shape)}, not a table of floats")
    if said.get("num_virtual_tokens") not in (None, tensor.shape[0]):
        wanted = brief(said["num_virtual_tokens"])
        raise ModelFormatError(f"{weights}: {tensor.shape[0]} rows, and {_CONFIG} says {wanted}: the file is damaged")
    return PrefixFile(tensor, method in _OF_KEYS, Path(base).name if isinstance(base, str) else "")


def row_of(spec: ModelSpec) -> RowShape:
    """The row of every layer. Raises UnsupportedError for models with other layers."""
    network = find_network(spec)
    row = network.rows[0]
    if row is None or row.key != row.stored_value or {row} != {*network.rows} or any(network.windows):
        raise UnsupportedError(
            "prefix tuning needs rows of all tokens in all layers, and this model has windows, states or other rows: "
            "train it by prompt tuning"
        )
    return row


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()
