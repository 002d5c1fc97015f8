"""gpt-oss: experts in MXFP4, which GGUF has as well, sinks in attention, windows in every other layer, YaRN.

The rows of gate and up alternate. Checkpoints in MXFP4 store them as `_blocks` and `_scales`. Checkpoints from training
store them as floats, transposed.
"""

from __future__ import annotations

from edge.converters.huggingface.architectures.common import (
    LLAMA_NAMES,
    SILU,
    USUAL,
    Architecture,
    Sizes,
    in_layers,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import Count, Fixed, changed
from edge.converters.huggingface.checkpoint import CheckpointTensor
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.quantized.floats import Mxfp4
from edge.converters.huggingface.views import Tensors, View
from edge.errors import UnsupportedError
from edge.formats.gguf_writer import Field
from edge.model.cores import SLOPE

_EXPERTS = "mlp.experts."
_DENSE = ("ffn_gate", "ffn_up", "ffn_down", "ffn_norm")
_PARTS = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}  # rows of gate_up_proj


def _rope(config: Config) -> Config:
    """YaRN. GGUF cannot say that its bounds are not rounded to whole pairs; its readers round them."""
    rope = read_rope(config, ("yarn",), 150_000.0)
    return Config(rope.path, {key: value for key, value in rope.values.items() if key != "truncate"})


def _others(config: Config, sizes: Sizes) -> dict[str, Field]:
    usual = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(sizes.layers)]
    if config.get("layer_types", usual) != usual:
        raise UnsupportedError(f"{config.path}: layer_types: in GGUF, each second layer has a window, no other")
    return {}


def _prepare(tensors: Tensors, _config: Config) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, part = name.partition(_EXPERTS)
        if not part or part.endswith(("_scales", ".weight", ".bias")):  # MLX has gate and up apart
            if not part.endswith("_scales") or name.replace("_scales", "_blocks") not in tensors:
                found[name] = tensor
            continue
        module, bias = part.removesuffix("_bias").removesuffix("_blocks"), part.endswith("_bias")
        whole = tensor
        if part.endswith("_blocks") and (scales := tensors.get(name.replace("_blocks", "_scales"))):
            whole = Mxfp4.of(tensor, scales)
        elif not bias and len(tensor.shape) == 3:
            experts, columns, rows = tensor.shape
            whole = View(tensor, name, (experts, rows, columns), lambda array: array.swapaxes(1, 2))
        suffix = "bias" if bias else "weight"
        if module != "gate_up_proj":
            found[f"{stem}{_EXPERTS}{module}.{suffix}"] = whole
            continue
        for each, rows_of in _PARTS.items():
            apart = f"{stem}{_EXPERTS}{each}_proj.{suffix}"
            found[apart] = _rows(whole, apart, rows_of)
    return found


def _rows(whole: CheckpointTensor, name: str, rows: slice) -> CheckpointTensor:
    if isinstance(whole, Mxfp4):
        return whole.with_rows(name, rows)
    shape = (*whole.shape[:1], len(range(*rows.indices(whole.shape[1]))), *whole.shape[2:])
    return View(whole, name, shape, lambda array: array[:, rows])


GPT_OSS = Architecture(
    name="gpt-oss",
    settings=(
        *changed(USUAL, head_dim=64, rms_norm_eps=1e-5), SILU,
        Count("sliding_window", ("attention.sliding_window",), "context", 128),
        Count("num_local_experts", ("expert_count",), "ffn", lambda config: config.count("num_experts", "ffn", 128)),
        Count("num_experts_per_tok", ("expert_used_count",), "ffn", 4),
        Count("", ("expert_feed_forward_length",), "ffn", lambda config: config.count("intermediate_size", "ffn")),
        Fixed("attention_bias", True), Fixed("swiglu_limit", 7.0), Fixed("swiglu_alpha", SLOPE),
    ),
    others=_others,
    names={ours: each for ours, each in LLAMA_NAMES.items() if not ours.endswith(_DENSE)} | in_layers(
        {
            "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": f"{_EXPERTS}gate_proj", "ffn_up_exps": f"{_EXPERTS}up_proj",
            "ffn_down_exps": f"{_EXPERTS}down_proj",
        }
    ),
    parameters=in_layers({"attn_sinks.weight": "self_attn.sinks"}),
    biases=frozenset(
        ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    ),
    prepare=_prepare,
    rope=_rope,
    yarn_bounds=True,
)  # fmt: skip
