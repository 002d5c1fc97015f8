"""Convert PEFT's LoRA adapters (adapter_config.json, adapter_model.safetensors) into llama.cpp's GGUF adapters.

An adapter adds s · B A to a matrix W, with s = α / rank, or α / √rank. Of DoRA (arXiv:2402.09353), which also scales
rows, `Pair` in edge/model/adapters/lora.py has the form. PiSSA (arXiv:2404.02948) and OLoRA (2406.01775) first take a
part B₀ A₀ out of W: here the adapter takes it out, with twice the rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures import adapted
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.layout import is_finite, to_float32, to_gguf
from edge.devices.output import new_file
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.blocks import FLOATS, dequantize
from edge.formats.gguf_writer import Field, Planned, write_gguf
from edge.formats.json_file import read_object, shown
from edge.formats.safetensors import Stored, read_header
from edge.model.adapters.lora import DORA, LORA, MAX_RANK, open_lora
from edge.model.adapters.lora_file import LoraFile
from edge.model.adapters.prefix import SOFT_PROMPTS, write_prefix
from edge.model.model import Model
from edge.types import AnyArray, FloatArray
from edge.values import brief

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ROOTS = r"(?:base_model\.)?(?:model\.)*(?:transformer\.|language_model\.(?:model\.)?)?"
_NAME = re.compile(
    rf"(?P<whole>{_ROOTS}(?P<module>(?:layers|h)\.(?P<layer>\d+)\..+|per_layer_model_projection))"
    r"\.lora_(?P<part>A|B|magnitude_vector)(?:\.default)?(?:\.weight)?"
)
# The values of settings under which an adapter changes matrices of layers, and by these parts only.
_PLAIN = {
    "modules_to_save": ([],), "bias": ("none",), "lora_bias": (False,), "layer_replication": (),
    "alora_invocation_tokens": ([],), "trainable_token_indices": (), "target_parameters": ([],),
    **dict.fromkeys(("velora_config", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config"), ()),
}  # fmt: skip
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")  # values of init_lora_weights that leave W as it is
_CHANGED_BASES = ("pissa", "olora")


def is_adapter_folder(path: Path) -> bool:
    return (path / CONFIG).is_file()


def convert_adapter(folder: Path, base: Model, target: Path) -> None:
    """Write the adapter as GGUF, atomically, and check it against its base model in GGUF; a soft prompt as safetensors,
    which --prefix reads.

    Raises InputError if it belongs to another model, ModelFormatError for damaged files, UnsupportedError for adapters
    that GGUF cannot express.
    """
    if read_object(folder / CONFIG).get("peft_type") in SOFT_PROMPTS:
        write_prefix(folder, target, base.spec)
        return
    settings = _read_settings(folder)
    if not (folder / WEIGHTS).is_file():
        raise InputError(f"{folder} has no {WEIGHTS}")
    changes = _find_changes(folder / WEIGHTS, base, settings)
    dora = any(change.magnitude for change in changes)
    fields: dict[str, Field] = {
        "general.type": "adapter", "adapter.type": DORA if dora else LORA,
        "adapter.lora.alpha": np.float32(settings.alpha), "general.architecture": base.spec.architecture,
        "general.name": folder.resolve().name,
    }  # fmt: skip
    planned = [each for change in changes for each in change.planned]
    with new_file(target) as temporary:
        write_gguf(temporary, fields, planned, (array for change in changes for array in change.arrays()))
        open_lora([LoraFile(temporary)], base.file, base.spec, merging=True)


@dataclass(frozen=True)
class _Settings:
    """What adapter_config.json says of the factors."""

    path: Path
    alpha: float
    alphas: Mapping[str, float]  # by patterns of modules
    by_root: bool  # rsLoRA: α / √rank instead of α / rank
    start: str  # one of _CHANGED_BASES, or nothing
    pooled: int  # QA-LoRA: inputs that are averaged before A; 1: none

    def factor(self, module: str, rank: int) -> float:
        alpha = next((alpha for key, alpha in self.alphas.items() if re.match(rf"(.*\.)?({key})$", module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def _read_settings(folder: Path) -> _Settings:
    config = Config(folder / CONFIG, read_object(folder / CONFIG))
    config.must_be("peft_type", "LORA")
    for key, allowed in _PLAIN.items():
        config.must_be(key, *allowed)
    rank, alpha = config.get("r"), config.positive("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank <= MAX_RANK:
        raise ModelFormatError(f"{config.path}: r is {brief(rank)}: it must be from 1 to {MAX_RANK}")
    patterns = config.part("alpha_pattern")
    alphas = {key: patterns.positive(key) for key in patterns.values} if patterns else {}
    for key in alphas:
        try:
            re.compile(key)
        except re.error:
            raise ModelFormatError(f"{config.path}: alpha_pattern has {brief(key)}, which is no pattern") from None
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS + _CHANGED_BASES:
        raise UnsupportedError(
            f"{config.path}: init_lora_weights is {brief(start)}, which changes the model by data that is not here: "
            "merge it with PEFT's merge_and_unload, and convert the merged model"
        )
    by_root = config.get("use_rslora") is True
    pooled = config.count("qalora_group_size", "ffn", 16) if config.get("use_qalora") is True else 1
    if pooled > 1 and start in _CHANGED_BASES:
        raise UnsupportedError(f"{config.path}: use_qalora with init_lora_weights {start!r} is not supported")
    return _Settings(config.path, alpha, alphas, by_root, start if start in _CHANGED_BASES else "", pooled)


@dataclass(frozen=True)
class _Change:
    """One matrix of the model, and what the adapter has for it."""

    name: str  # of the matrix in GGUF, without `.weight`
    module: str  # its name in the model that was trained
    a: Stored
    b: Stored
    magnitude: Stored | None
    base: Model
    settings: _Settings

    @property
    def rank(self) -> int:
        return self.b.shape[1]

    @cached_property
    def factor(self) -> float:
        """The factor of B that the file's alpha and rank leave to do."""
        rank = 2 * self.rank if self.settings.start else self.rank
        return self.settings.factor(self.module, self.rank) * rank / self.settings.alpha

    @property
    def _changed(self) -> bool:
        """Whether A and B are not those of the file."""
        return bool(self.settings.start) or self.settings.pooled > 1 or self.factor != 1

    @property
    def planned(self) -> list[Planned]:
        exact, parts = self._changed, [(self.a, "lora_a"), (self.b, "lora_b")]
        found = []
        for stored, part in parts:
            shape = list(stored.shape[::-1])
            shape[1 if part == "lora_a" else 0] *= 2 if self.settings.start else 1
            shape[0] *= self.settings.pooled if part == "lora_a" else 1
            found.append(Planned(f"{self.name}.weight.{part}", tuple(shape), "F32" if exact else stored.dtype))
        if self.magnitude:
            found.append(Planned(f"{self.name}.weight.lora_magnitude", (self.b.shape[0],), "F32"))
        return found

    def arrays(self) -> Iterator[AnyArray]:
        """The tensors, with rows in the order of the GGUF matrix."""
        a, b = _read(self.a), self._ordered(_read(self.b))
        if self._changed:
            a, b = to_float32(a, self.a.dtype), to_float32(b, self.b.dtype)
            if self.settings.start:
                first_a, first_b = self._taken_out()
                a, b = np.concatenate([a, first_a]), np.concatenate([b, -first_b], axis=1)
            if (pooled := self.settings.pooled) > 1:  # PEFT multiplies averages by the number of groups
                a = np.repeat(a, pooled, axis=1) * np.float32(a.shape[1] / pooled)
            b = (b * np.float32(self.factor)).astype(np.float32)
        yield from (np.ascontiguousarray(each).view(np.uint8).reshape(len(each), -1) for each in (a, b))
        if self.magnitude:
            values = to_float32(_read(self.magnitude), self.magnitude.dtype).reshape(-1, 1)
            yield np.ascontiguousarray(self._ordered(values)).view(np.uint8).reshape(-1)

    def _ordered(self, array: AnyArray) -> AnyArray:
        spec, stem = self.base.spec, self.name.rpartition(".")[2]
        if adapted(spec.architecture).layouts.get(stem) != "interleaved":
            return array
        heads = spec.heads if stem == "attn_q" else spec.kv_heads
        if len(array) % (2 * heads):
            raise InputError(f"{self.b.path}: {self.b.name} has {len(array)} rows: it belongs to another model")
        return to_gguf(array, "interleaved", heads)

    def _taken_out(self) -> tuple[FloatArray, FloatArray]:
        """A₀ and B₀: s · B₀ A₀ is what PEFT takes out of the matrix before it adds the adapter."""
        file, start = self.base.file, self.settings.start
        info = file.tensors.get(f"{self.name}.weight")
        if info is None or info.type not in FLOATS:
            raise InputError(
                f"{self.settings.path}: init_lora_weights {start!r} takes a part out of the model's weights: name it "
                "unquantized, as edge convert FOLDER model.gguf writes it"
            )
        weights = dequantize(file.tensor_bytes(info).reshape(info.shape[1], -1), info.type)
        if start == "olora":
            q, r = np.linalg.qr(weights)
            return r[: self.rank], q[:, : self.rank]
        u, s, v = np.linalg.svd(weights, full_matrices=False)
        root = np.sqrt(s[: self.rank] / np.float32(self.settings.factor(self.module, self.rank)))
        return root[:, None] * v[: self.rank], u[:, : self.rank] * root


def _find_changes(path: Path, base: Model, settings: _Settings) -> list[_Change]:
    ours = {theirs: name for name, theirs in adapted(base.spec.architecture).names.items()}
    found: dict[str, dict[str, Stored]] = {}
    names: dict[str, str] = {}
    attention = base.spec.network.attention if base.spec.network else ()
    rowless = {layer for layer, core in enumerate(attention) if core and core.rows_of is not None}
    for name, stored in read_header(path).items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise UnsupportedError(f"{path}: {shown(name)} is no part of a LoRA pair in a layer")
        layer = match["layer"]
        stem = ours.get(match["module"].replace(f".{layer}.", ".{}.", 1))
        if stem is None:
            raise UnsupportedError(f"{path}: {shown(name)} changes no matrix of a {base.spec.architecture} model")
        if (len(stored.shape) != 2 and match["part"] in "AB") or stored.dtype not in FLOATS:
            raise UnsupportedError(f"{path}: {shown(name)} is {stored.dtype} of shape {stored.shape}: not supported")
        tensor = stem.format(layer)
        if layer and int(layer) in rowless and tensor.endswith(("attn_k", "attn_v")):
            continue  # of older versions of transformers: nothing reads these rows
        found.setdefault(tensor, {})[match["part"]] = stored
        names[tensor] = match["whole"].removeprefix("base_model.model.")
    for tensor, parts in found.items():
        if not {"A", "B"} <= parts.keys():
            raise ModelFormatError(f"{path}: {tensor} has only one of lora_A and lora_B")
    return [
        _Change(tensor, names[tensor], parts["A"], parts["B"], parts.get("magnitude_vector"), base, settings)
        for tensor, parts in found.items()
    ]


def _read(stored: Stored) -> Any:
    array = stored.read()
    if not is_finite(array, stored.dtype):
        raise ModelFormatError(f"{stored.path}: {stored.name} has values that are no numbers, or infinite")
    return array
