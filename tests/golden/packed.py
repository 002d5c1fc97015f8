"""Make the golden quantized matrices: one matrix in each format, packed and read back by the format's own library.

Run it in an environment with torch, compressed-tensors, mlx, bitsandbytes and auto-round, of which edge needs none:

    python tests/golden/packed.py [NAME]...

It writes packed/NAME.safetensors, whose tensors have the names that the library gives those of a module called
`model.layers.0.mlp.down_proj` (64 rows, 96 or 128 columns), `values`, every 21st row of the float matrix as the
library dequantizes it in float32, and config.json's `quantization_config` (or `quantization` of MLX) as metadata.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

NAME = "model.layers.0.mlp.down_proj"
ROWS, COLUMNS, WIDE = 64, 96, 128
Made = tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]


def matrix(columns: int = COLUMNS, seed: int = 7) -> torch.Tensor:
    """Weights whose columns and rows differ in size, so that scales do."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((ROWS, columns)) * np.exp(random.standard_normal((ROWS, 1)) / 2) * 0.05
    return torch.from_numpy((values * np.exp(random.standard_normal(columns) / 3)).astype(np.float32))


def compressed(weights: dict[str, Any], form: str, order: bool = False) -> Made:
    """compressed-tensors: a compressor of its own, with scales as its observers choose them."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = matrix(WIDE if args.group_size == 16 else COLUMNS).to(torch.bfloat16)
    state: dict[str, torch.Tensor] = {"weight": weight}
    rows, columns = weight.shape
    groups: Any = torch.arange(columns) // (args.group_size or columns)
    shuffled = torch.from_numpy(np.random.default_rng(3).permutation(columns)) if order else torch.arange(columns)
    weight = state["weight"] = weight[:, shuffled]
    if args.strategy == "tensor":
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    else:
        chosen = [weight[:, groups == group] for group in range(int(groups.max()) + 1)]
        low = torch.stack([each.amin(dim=1) for each in chosen], dim=1)
        high = torch.stack([each.amax(dim=1) for each in chosen], dim=1)
    others = {}
    if args.strategy == "tensor_group":
        others["global_scale"] = generate_gparam(weight.amin(), weight.amax())
        state["weight_global_scale"] = others["global_scale"].reshape(1)
    scale, zero = calculate_qparams(low, high, args, **others)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, scheme)
    floats = {
        name: each.float() if name == "weight_scale" and each.dtype == torch.bfloat16 else each
        for name, each in packed.items()
    }
    values = compressor.decompress(floats, scheme)["weight"].float()
    if args.strategy == "tensor_group":  # the compressor reads it in bfloat16
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        codes = unpack_fp4_from_uint8(packed["weight_packed"], rows, columns, torch.float32)
        values = dequantize(
            codes, packed["weight_scale"].float(), None, args, global_scale=others["global_scale"], dtype=torch.float32
        )
    if order:  # columns go back to their places, and say which group they were in
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

        back = torch.argsort(shuffled)
        codes = unpack_from_int32(packed["weight_packed"], args.num_bits, weight.shape)
        packed["weight_packed"] = pack_to_int32(codes[:, back].contiguous(), args.num_bits)
        packed["weight_g_idx"], values = groups[back].to(torch.int32), values[:, back]
    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
    said = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return packed, values, said


def mlx(mode: str, bits: int, size: int) -> Made:
    import mlx.core as mx

    columns = WIDE if size >= 64 or mode == "nvfp4" else COLUMNS
    weight = mx.array(matrix(columns).numpy()).astype(mx.float16 if bits == 8 else mx.bfloat16)
    packed = dict(
        zip(("weight", "scales", "biases"), mx.quantize(weight, group_size=size, bits=bits, mode=mode), strict=False)
    )
    exact = dict(packed)
    if mode == "affine":
        exact |= {part: packed[part].astype(mx.float32) for part in ("scales", "biases")}
    how = {"group_size": size, "bits": bits, "mode": mode}
    values = mx.dequantize(exact["weight"], exact["scales"], exact.get("biases"), dtype=mx.float32, **how)
    folder = Path(sys.argv[0]).parent / "mlx.safetensors"
    mx.save_safetensors(str(folder), packed)
    from safetensors.torch import load_file

    tensors = load_file(folder)
    folder.unlink()
    return tensors, torch.from_numpy(np.array(values)), how


def mlx_model() -> Made:
    """All tensors of folders/qwen3 in MLX, 4 bits, and mlx-lm's logits for its tokens, in float32, as values."""
    import tempfile

    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.convert import convert
    from safetensors.torch import load_file

    source = Path(__file__).parent / "folders" / "qwen3"
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "mlx"
        convert(str(source), str(folder), quantize=True, q_bits=4, q_group_size=32, dtype="float16")
        model, _ = load(str(folder))
        model.set_dtype(mx.float32)
        answers = np.load(source.with_suffix(".npz"))
        logits = model(mx.array(answers["tokens"])[None])[0, -len(answers["logits"]) :]
        tensors = load_file(folder / "model.safetensors")
        return tensors, torch.from_numpy(np.array(logits)), {"group_size": 32, "bits": 4, "mode": "affine"}


def fp8() -> Made:
    """As Qwen and DeepSeek write it, read by transformers."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, (height, width) = matrix(), (32, 32)
    parts = weight.reshape(ROWS // height, height, COLUMNS // width, width)
    scale = parts.abs().amax(dim=(1, 3)) / 448
    packed = (parts / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    values = Fp8Dequantize(None)._dequantize_one(packed, scale, torch.float32)
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [height, width]}
    return {"weight": packed, "weight_scale_inv": scale}, values, said


def modelopt(kind: str) -> Made:
    """As NVIDIA's modelopt writes it."""
    weight = matrix()
    said = {"quant_method": "modelopt", "quant_algo": kind}
    if kind == "FP8":
        scale = weight.abs().max() / 448
        packed = (weight / scale).to(torch.float8_e4m3fn)
        parts = {"weight": packed, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
        return parts, packed.float() * scale, said
    tensors, values, _ = compressed(NVFP4, "nvfp4-pack-quantized")
    factor = tensors.pop("weight_global_scale")
    found = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}
    return found | {"weight_scale_2": (1 / factor).reshape(()), "input_scale": torch.tensor(1.0)}, values, said


def bitsandbytes(kind: str, double: bool) -> Made:
    from bitsandbytes import functional

    weight, said = matrix(WIDE), {"quant_method": "bitsandbytes", "load_in_4bit": kind != "int8"}
    if kind == "int8":
        packed, scale, _ = functional.int8_vectorwise_quant(weight.half())
        values = functional.int8_vectorwise_dequant(packed, scale)
        return {"weight": packed, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}, values, said
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=double)
    values = functional.dequantize_4bit(packed, state)
    return (
        {"weight": packed} | {f"weight.{key}": each for key, each in state.as_dict(packed=True).items()},
        values,
        said,
    )


def auto_round(bits: int, symmetric: bool, layout: str) -> Made:
    """AutoRound's own packing, of its torch kernels."""
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    size, weight = 32, matrix()
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float16)
    linear.weight.data.copy_(weight)
    parts = weight.reshape(ROWS, -1, size)
    low, high = parts.amin(dim=2), parts.amax(dim=2)
    most = (1 << bits) - 1
    if symmetric:
        scale, zero = parts.abs().amax(dim=2) * 2 / most, torch.full_like(low, 1 << bits - 1)
    else:
        scale = (high.clamp(min=0) - low.clamp(max=0)) / most
        zero = (-low.clamp(max=0) / scale).round().clamp(1, most)
    scale = scale.half().float()
    module = qlinear_torch_zp if layout.endswith("auto_gptq") else qlinear_torch
    made = module.QuantLinear(bits, size, COLUMNS, ROWS, False)
    made.device = "cpu"
    made.pack(linear, scale, zero, None, "cpu")
    steps, zeros = scale.repeat_interleave(size, 1), zero.repeat_interleave(size, 1)
    codes = ((weight.half().float() + zeros * steps) / steps).round().clamp(0, most)
    values = (codes - zeros) * steps
    said = {"quant_method": "auto-round", "packing_format": layout, "bits": bits, "group_size": size, "sym": symmetric}
    tensors = {key: each for key, each in made.state_dict().items() if key in ("qweight", "qzeros", "scales")}
    return tensors, values, said


GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
EIGHT = {"num_bits": 8, "strategy": "channel", "symmetric": True}
MAKERS: dict[str, Callable[[], Made]] = {
    "fp8-block": fp8,
    "fp8-modelopt": lambda: modelopt("FP8"),
    "nvfp4-modelopt": lambda: modelopt("NVFP4"),
    "fp8-channel": lambda: compressed(EIGHT | {"type": "float"}, "float-quantized"),
    "int8-channel": lambda: compressed(EIGHT | {"type": "int"}, "int-quantized"),
    "int4-group": lambda: compressed(GROUP | {"symmetric": True}, "pack-quantized"),
    "int4-zeros": lambda: compressed(GROUP | {"symmetric": False}, "pack-quantized"),
    "int4-order": lambda: compressed(GROUP | {"symmetric": True}, "pack-quantized", order=True),
    "int8-pack": lambda: compressed(EIGHT | {"type": "int"}, "pack-quantized"),
    "int3-zeros": lambda: compressed(GROUP | {"symmetric": False, "num_bits": 3}, "pack-quantized"),
    "nvfp4": lambda: compressed(NVFP4, "nvfp4-pack-quantized"),
    "mxfp4": lambda: compressed(
        GROUP | {"type": "float", "symmetric": True}, "mxfp4-pack-quantized"
    ),
    **{f"mlx-{bits}-{size}": lambda bits=bits, size=size: mlx("affine", bits, size)
       for bits, size in ((2, 32), (3, 32), (4, 64), (4, 128), (5, 32), (6, 32), (8, 32))},
    "mlx-model": mlx_model,
    "mlx-mxfp4": lambda: mlx("mxfp4", 4, 32),
    "mlx-nvfp4": lambda: mlx("nvfp4", 4, 16),
    "mlx-mxfp8": lambda: mlx("mxfp8", 8, 32),
    "nf4-double": lambda: bitsandbytes("nf4", True),
    "fp4-double": lambda: bitsandbytes("fp4", True),
    "bnb-int8": lambda: bitsandbytes("int8", False),
    "round-gptq": lambda: auto_round(4, True, "auto_round:auto_gptq"),
    "round-zeros": lambda: auto_round(4, False, "auto_round:auto_gptq"),
    "round-v2": lambda: auto_round(4, False, "auto_round"),
    "round-8": lambda: auto_round(8, True, "auto_round"),
    "round-3": lambda: auto_round(3, False, "auto_round"),
}  # fmt: skip


def main(names: list[str]) -> None:
    folder = Path(__file__).parent / "packed"
    folder.mkdir(exist_ok=True)
    for name, make in MAKERS.items():
        if names and name not in names:
            continue
        tensors, values, said = make()
        whole = name == "mlx-model"
        found = {part if whole else f"{NAME}.{part}": each.contiguous() for part, each in tensors.items()}
        found["values"] = (values if whole else values[::21]).contiguous()
        save_file(found, folder / f"{name}.safetensors", metadata={"settings": json.dumps(said)})


if __name__ == "__main__":
    main(sys.argv[1:])
