"""Which weights an ONNX model has, in what form, and where each lies in its data file: known before any is read."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from edge.backends.tensors import Source, find_recipe, find_tensors
from edge.converters.writers.onnx_blocks import BLOCK, bits_of, has_minimum
from edge.errors import UnsupportedError
from edge.gguf_file import GGUFFile
from edge.spec import ModelSpec, Recipe

_PAGE = 4096  # where tensors begin: mapped files are read page by page
ITEM_BYTES = {"float32": 4, "uint8": 1}


@dataclass(frozen=True)
class Part:
    """Rows of a tensor of the file. heads: their number where rows have to be put in another order, else 0.

    Conversion to GGUF makes the two values that RoPE turns together neighbours in Llama models; ONNX Runtime wants one
    in each half of a head.
    """

    source: Source
    heads: int


@dataclass(frozen=True)
class Matrix:
    """A matrix of the graph: parts of the file's tensors, row behind row.

    bits: 4, 8, or 32 for float32. minima: with zero points, and `means` more columns for the means of blocks of inputs.
    """

    parts: tuple[Part, ...]
    rows: int
    columns: int
    bits: int
    minima: bool

    @property
    def means(self) -> int:
        return self.columns // BLOCK if self.minima else 0

    @property
    def blocks(self) -> int:
        return -(-(self.columns + self.means) // BLOCK)


@dataclass(frozen=True)
class Place:
    """Where an array lies in the data file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """matrices and vectors by name: `blk.0.qkv` is attn_q, attn_k and attn_v. Arrays of a matrix end in .quants,
    .scales and .zeros, or .floats."""

    matrices: dict[str, Matrix]
    vectors: dict[str, tuple[Part, ...]]
    places: dict[str, Place]
    nbytes: int


def check_recipe(spec: ModelSpec) -> Recipe:
    """Raises UnsupportedError for what the graph does not say: all but Llama, Qwen2, Qwen3 and their kin."""
    recipe = find_recipe(spec)
    lacking = {
        "learned positions": recipe.learned_positions,
        "two kinds of RoPE": len(recipe.ropes) > 1,
        "partial RoPE": any(rope.dim != spec.head_dim for rope in recipe.ropes),
        "RoPE factors that depend on the context": any(rope.scaling == "longrope" for rope in recipe.ropes),
        "sliding windows": any(recipe.windows),
        "layer norms": recipe.norm != "rms",
        f"{recipe.activation} activations": recipe.activation != "silu" or not recipe.gated,
        "scaled embeddings": recipe.embedding_scale != 1,
        "capped scores": bool(recipe.score_cap or recipe.logit_cap),
        "heads whose size is no multiple of 16": spec.head_dim % 16 != 0,
    }
    if found := [what for what, is_so in lacking.items() if is_so]:
        raise UnsupportedError(f"the ONNX writer does not know {found[0]} ({spec.architecture}): use --backend tvm")
    return recipe


def make_layout(file: GGUFFile, spec: ModelSpec) -> Layout:
    """Raises UnsupportedError, ModelFormatError as `find_tensors` does."""
    recipe, found = check_recipe(spec), find_tensors(file, spec)
    maker = _Maker(file, found, {} if recipe.halves else {"attn_q": spec.heads, "attn_k": spec.kv_heads})
    maker.table("token_embd")
    for layer in range(spec.layers):
        at = f"blk.{layer}."
        for name in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            maker.vector(at + name, at + name)
        maker.matrix(f"{at}qkv", *(f"{at}attn_{part}" for part in "qkv"))
        for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            maker.matrix(at + name, at + name)
    maker.vector("output_norm", "output_norm")
    if not spec.tied_head:
        maker.matrix("output", "output")
    if unused := sorted(name for name in set(found) - maker.used if not name.startswith("rope_")):
        raise UnsupportedError(f"the ONNX writer does not know the tensor {unused[0]}: use --backend tvm")
    return Layout(maker.matrices, maker.vectors, maker.places, maker.end)


class _Maker:
    """Gives every array its place, one behind the other."""

    def __init__(self, file: GGUFFile, found: dict[str, Source], heads: dict[str, int]) -> None:
        self._file, self._found, self._heads = file, found, heads
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, tuple[Part, ...]] = {}
        self.places: dict[str, Place] = {}
        self.used: set[str] = set()
        self.end = 0

    def table(self, name: str) -> None:
        """A matrix whose rows are looked up, too: without columns for means."""
        (part,) = self._parts((name,))
        info = self._file.tensors[part.source.tensor]
        bits = 8 if has_minimum(info.type, bits_of(info.type)) else bits_of(info.type)
        self._matrix(name, (part,), bits if info.shape[0] % BLOCK == 0 else 32, minima=False)

    def matrix(self, name: str, *names: str) -> None:
        parts = self._parts(names)
        infos = [self._file.tensors[part.source.tensor] for part in parts]
        bits = max(bits_of(info.type) for info in infos) if infos[0].shape[0] % BLOCK == 0 else 32
        self._matrix(name, parts, bits, any(has_minimum(info.type, bits) for info in infos))
        biases = [f"{each}.bias" for each in names]
        if all(bias in self._found for bias in biases):
            self.vector(f"{name}.bias", *biases)

    def _matrix(self, name: str, parts: tuple[Part, ...], bits: int, minima: bool) -> None:
        rows, columns = sum(part.source.rows for part in parts), self._file.tensors[parts[0].source.tensor].shape[0]
        matrix = self.matrices[name] = Matrix(parts, rows, columns, bits, minima)
        if bits == 32:
            self._place(f"{name}.floats", "float32", rows, columns)
            return
        self._place(f"{name}.quants", "uint8", rows, matrix.blocks, BLOCK * bits // 8)
        self._place(f"{name}.scales", "float32", rows, matrix.blocks)
        if minima:
            self._place(f"{name}.zeros", "uint8", rows, (matrix.blocks * bits + 7) // 8)

    def vector(self, name: str, *names: str) -> None:
        """If the model has it."""
        if all(each in self._found for each in names):
            self.vectors[name] = self._parts(names)
            self._place(name, "float32", sum(part.source.rows for part in self.vectors[name]))

    def _parts(self, names: tuple[str, ...]) -> tuple[Part, ...]:
        self.used.update(names)
        stems = [name.removesuffix(".bias").rpartition(".")[2] for name in names]
        return tuple(Part(self._found[name], self._heads.get(stem, 0)) for name, stem in zip(names, stems, strict=True))

    def _place(self, name: str, dtype: str, *shape: int) -> None:
        self.places[name] = Place(dtype, shape, self.end)
        self.end += -(-self.places[name].nbytes // _PAGE) * _PAGE
