"""Model files for `peers.py` and `block_types.py`, written once.

make_file.py pure SOURCE TARGET                         every matrix of SOURCE in Q4_0, by llama.cpp's own quantizer
make_file.py random SOURCE TARGET HIDDEN LAYERS FFN     a Llama of that shape with random Q4_0 weights: 64 wide heads,
                                                        4 query heads per KV head, the first tokens of SOURCE
make_file.py qwen2 SOURCE TARGET                        the shape of Qwen2-0.5B with random Q4_0 weights, the tokens of
                                                        SOURCE and words that fill its vocabulary up
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_Q4_0 = 2  # llama_ftype, and ggml_type too
_VOCAB, _HEAD, _CONTEXT = 32768, 64, 8192
_SPREAD = 0.02 / 4.6  # 4.6 is the standard deviation of a random nibble: weights get one of 0.02


def quantize(source: Path, target: Path) -> None:
    import ctypes

    from llama_worker import low_level

    library = low_level()
    parameters = library.llama_model_quantize_default_params()
    parameters.ftype = _Q4_0
    parameters.pure = True
    parameters.allow_requantize = True
    status = library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
    if status != 0:
        raise RuntimeError(f"llama_model_quantize returned {status}")


@dataclass(frozen=True)
class Shape:
    """A random model with heads of 64 values and a tied head. Qwen2 has biases on queries, keys and values."""

    architecture: str
    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    rope_base: float

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, outermost first."""
        queries, kv = self.heads * _HEAD, self.kv_heads * _HEAD
        tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab, self.hidden)}
        tensors["output_norm.weight"] = (self.hidden,)
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (self.hidden,),
            "attn_q.weight": (queries, self.hidden),
            "attn_k.weight": (kv, self.hidden),
            "attn_v.weight": (kv, self.hidden),
            "attn_output.weight": (self.hidden, queries),
            "ffn_norm.weight": (self.hidden,),
            "ffn_gate.weight": (self.ffn, self.hidden),
            "ffn_up.weight": (self.ffn, self.hidden),
            "ffn_down.weight": (self.hidden, self.ffn),
        }
        if self.architecture == "qwen2":
            parts |= {"attn_q.bias": (queries,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        for layer in range(self.layers):
            tensors |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
        return tensors


QWEN2 = Shape("qwen2", hidden=896, layers=24, ffn=4864, heads=14, kv_heads=2, vocab=151_936, rope_base=1e6)


def random_model(source: Path, target: Path, model: Shape) -> None:
    import gguf

    writer = gguf.GGUFWriter(target, model.architecture)
    writer.add_name(f"random {model.architecture} {model.hidden}x{model.layers}")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.ffn)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_rope_freq_base(model.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(model.vocab)
    writer.add_file_type(_Q4_0)
    _copy_tokenizer(writer, source, model.vocab)
    for name, shape in model.tensors.items():
        matrix = len(shape) == 2
        dtype = np.dtype(np.uint8 if matrix else np.float32)
        nbytes = shape[0] * shape[1] // 32 * 18 if matrix else shape[0] * 4
        raw_shape = (shape[0], shape[1] // 32 * 18) if matrix else shape
        kind = gguf.GGMLQuantizationType.Q4_0 if matrix else None
        writer.add_tensor_info(name, raw_shape, dtype, nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(0)
    for shape in model.tensors.values():
        writer.write_tensor_data(_random_q4_0(generator, *shape) if len(shape) == 2 else np.ones(shape, np.float32))
    writer.close()


def _random_q4_0(generator: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Random blocks, uint8 [rows, bytes]: a float16 scale and 32 random nibbles each."""
    blocks = np.empty((rows * columns // 32, 18), np.uint8)
    blocks[:, 2:] = generator.integers(0, 256, (blocks.shape[0], 16), dtype=np.uint8)
    scales = _SPREAD * generator.uniform(0.5, 1.5, (blocks.shape[0], 1))
    blocks[:, :2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def _copy_tokenizer(writer: object, source: Path, vocab: int) -> None:
    """The first tokens of SOURCE, and the merges among them; words fill a larger vocabulary."""
    import gguf

    from edge.formats.gguf import read_gguf

    assert isinstance(writer, gguf.GGUFWriter)
    file = read_gguf(source)
    tokens = list(file.strings("tokenizer.ggml.tokens"))[:vocab]
    fillers = vocab - len(tokens)
    known = set(tokens)
    merges = [
        merge
        for merge in file.strings("tokenizer.ggml.merges")
        if known.issuperset(merge.split(" ")) and merge.replace(" ", "") in known
    ]
    writer.add_tokenizer_model(file.metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(file.metadata["tokenizer.ggml.pre"])
    writer.add_token_list([*tokens, *(f"filler{index}" for index in range(fillers))])
    writer.add_token_types([*file.numbers("tokenizer.ggml.token_type")[:vocab].tolist(), *[1] * fillers])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(file.metadata["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(file.metadata["tokenizer.ggml.eos_token_id"])
    writer.add_unk_token_id(file.metadata["tokenizer.ggml.unknown_token_id"])
    writer.add_pad_token_id(file.metadata["tokenizer.ggml.padding_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(file.metadata["tokenizer.chat_template"])  # OpenVINO wants one


def main(kind: str, source: str, target: str, *shape: int) -> None:
    """Write to a temporary name first, so that an incomplete file is never used."""
    partial = Path(target).with_suffix(".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pure":
        quantize(Path(source), partial)
    elif kind == "qwen2":
        random_model(Path(source), partial, QWEN2)
    else:
        hidden, layers, ffn = shape
        heads = hidden // _HEAD
        llama = Shape("llama", hidden, layers, ffn, heads, max(1, heads // 4), _VOCAB, rope_base=1e5)
        random_model(Path(source), partial, llama)
    partial.rename(target)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
