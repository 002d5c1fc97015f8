"""read_spec: a header's figures, and what is refused because they contradict each other or because engines abort."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, load_engine
from test_gguf_file import ARRAY, BOOL, F32, GGUF, I32, STRING, U32, Value

from edge.errors import EdgeError, ModelFormatError, UnsupportedError
from edge.formats.gguf import read_gguf
from edge.model.model import open_model
from edge.model.reader import ARCHITECTURES, read_spec
from edge.model.structure.spec import ModelSpec


def spec_of(path: Path) -> ModelSpec:
    return read_spec(read_gguf(path))


def zeros(*shape: int) -> tuple[tuple[int, ...], int, bytes]:
    return shape, 0, bytes(4 * math.prod(shape))


def test_one_figure_for_all_layers_may_be_list(tmp_path: Path) -> None:
    file = GGUF.read().set(
        attention__head_count_kv=(ARRAY, (U32, [2, 2])), feed_forward_length=(ARRAY, (I32, [96, 96]))
    )
    spec = spec_of(file.write(tmp_path / "m.gguf"))
    assert (spec.kv_heads, spec.ffn) == (2, 96)


@pytest.mark.parametrize(("window", "windows"), [(511, (511, 511)), (512, (0, 0)), (1 << 18, (0, 0))])
def test_window_beyond_context_counts_as_none(tmp_path: Path, window: int, windows: tuple[int, int]) -> None:
    spec = spec_of(GGUF.read().set(attention__sliding_window=(U32, window)).write(tmp_path / "m.gguf"))
    assert (spec.context, spec.window) == (512, window)
    assert spec.network.windows == windows


Edit = Callable[[GGUF], object]


def key(name: str, value: Value | None) -> Edit:
    def edit(file: GGUF) -> None:
        file.metadata.pop(name, None)
        if value is not None:
            file.metadata[name] = value

    return edit


def figure(name: str, value: Any, kind: int = U32) -> Edit:
    return key(f"llama.{name}", None if value is None else (kind, value))


def tensor(name: str, value: tuple[tuple[int, ...], int, bytes] | None) -> Edit:
    def edit(file: GGUF) -> None:
        file.tensors.pop(name, None)
        if value is not None:
            file.tensors[name] = value

    return edit


def no_text(file: GGUF) -> None:
    key("general.architecture", (STRING, "clip"))(file)
    del file.tensors["token_embd.weight"]


DAMAGED: dict[str, tuple[Edit, str]] = {
    "no architecture": (key("general.architecture", None), "general.architecture is missing"),
    "no embedding": (tensor("token_embd.weight", None), "has no token_embd.weight"),
    "an embedding of one dimension": (tensor("token_embd.weight", zeros(64)), "1 dimensions instead of 2"),
    "no layers": (figure("block_count", None), "llama.block_count is missing"),
    "zero layers": (figure("block_count", 0), "block_count is 0: it must be from 1 to 512"),
    "a layer too many": (figure("block_count", 3), "layer 2 of 3 has no attn_q.weight"),
    "a layer too few": (figure("block_count", 1), "belongs to none of 1 layers"),
    "layers that are a text": (figure("block_count", "x" * 10_000, STRING), "it must be from 1 to 512"),
    "another width": (figure("embedding_length", 65), "embedding_length differs"),
    "zero heads": (figure("attention.head_count", 0), "it must be from 1"),
    "three KV heads": (figure("attention.head_count_kv", 3), "4 heads cannot share 3 KV heads"),
    "more heads than values": (figure("attention.head_count", 128), "key_length is 0"),
    "other heads": (figure("attention.head_count", 8), "rope.dimension_count is 16, but heads have 8 values"),
    "other KV heads": (figure("attention.head_count_kv", 4), "has shape (64, 32) instead of (64, 64)"),
    "another vocabulary": (figure("vocab_size", 271), "vocab_size differs"),
    "another feed-forward": (figure("feed_forward_length", 64), "instead of"),
    "a negative base": (figure("rope.freq_base", -1.0, F32), "it must lie between 0"),
    "a negative epsilon": (figure("attention.layer_norm_epsilon", -1.0, F32), "it must lie between 0 and 1"),
    "a scale that is not a number": (figure("attention.scale", float("nan"), F32), "llama.attention.scale is nan"),
    "an odd RoPE": (figure("rope.dimension_count", 15), "rope.dimension_count is 15"),
    "a RoPE smaller than the head": (figure("rope.dimension_count", 8), "but heads have 16 values"),
    "keys of another size": (figure("attention.key_length", 32), "rope.dimension_count is 16"),
    "values of another size": (figure("attention.value_length", 8), "has shape"),
    "no keys": (tensor("blk.1.attn_k.weight", None), "layer 1 of 2 has no attn_k.weight"),
    "a norm of another size": (tensor("blk.0.attn_norm.weight", zeros(65)), "instead of (64,)"),
    "a bias of another size": (tensor("blk.0.attn_k.bias", zeros(64)), "instead of (32,)"),
    "a matrix turned": (tensor("blk.0.ffn_down.weight", zeros(64, 96)), "shape (64, 96) instead of (96, 64)"),
    "a norm of halves": (tensor("blk.0.attn_norm.weight", ((64,), 1, bytes(128))), "is of type F16"),
    "weights that are activations": (tensor("blk.0.attn_q.weight", ((64, 64), 9, bytes(5120))), "is of type Q8_1"),
    "a scale of nothing": (tensor("output.scale", zeros(1)), "belongs to output.weight, which is missing"),
    "an unknown architecture": (key("general.architecture", (STRING, "mamba")), "mamba.embedding_length is missing"),
    "experts without tensors": (figure("expert_count", 8), "its experts are 8, used 0, tensors 0"),
    "a layer with two numbers": (tensor("blk.0.0.attn_q.weight", zeros(64, 64)), "belongs to none of 2 layers"),
}  # fmt: skip

UNSUPPORTED: dict[str, tuple[Edit, str]] = {
    "an architecture of two lines": (key("general.architecture", (STRING, "a\nb")), r"'a\nb' is not supported"),
    "no text": (no_text, "an encoder of pictures or sounds, not a model"),
    "heads that differ": (figure("attention.head_count", (U32, [4, 2]), ARRAY), "differs from layer to layer"),
    "attention to what comes": (figure("attention.causal", False, BOOL), "not causal"),
    "an unknown RoPE scaling": (figure("rope.scaling.type", "su\n", STRING), r"RoPE scaling 'su\n' is not one of"),
    "a stack of matrices": (tensor("blk.0.ffn_up_exps.weight", zeros(64, 96, 2)), "has 3 dimensions"),
}  # fmt: skip


def refusal(edit: Edit, path: Path, error: type[EdgeError]) -> str:
    file = GGUF.read()
    edit(file)
    with pytest.raises(error) as caught:
        spec_of(file.write(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.isprintable()
    assert len(message) < len(str(path)) + 200
    return message


@pytest.mark.parametrize(("edit", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_headers_are_refused(tmp_path: Path, edit: Edit, message: str) -> None:
    assert message in refusal(edit, tmp_path / "m.gguf", ModelFormatError)


@pytest.mark.parametrize(("edit", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_headers_are_refused(tmp_path: Path, edit: Edit, message: str) -> None:
    assert message in refusal(edit, tmp_path / "m.gguf", UnsupportedError)


def test_zero_experts_are_none(tmp_path: Path) -> None:
    file = GGUF.read().set(expert_count=(U32, 0), expert_used_count=(U32, 0), attention__causal=(BOOL, True))
    assert spec_of(file.write(tmp_path / "m.gguf")).layers == 2


def renamed(architecture: str, **figures: Value) -> GGUF:
    file = GGUF.read().set(**figures)
    file.metadata = {str(name).replace("llama.", f"{architecture}.", 1): value for name, value in file.metadata.items()}
    file.metadata["general.architecture"] = (STRING, architecture)
    return file


WINDOW: Value = (U32, 128)


@pytest.mark.parametrize(("file", "accepted"), [
    (renamed("gemma2"), True), (renamed("gemma2", attention__sliding_window_pattern=(U32, 1)), False),
    (renamed("gemma2", attention__sliding_window_pattern=(ARRAY, (BOOL, [True, True]))), False),
    (renamed("gemma3"), True), (renamed("gemma3", attention__sliding_window=WINDOW), False),
    (renamed("gemma3", attention__sliding_window=WINDOW, attention__sliding_window_pattern=(U32, 2)), True),
    (renamed("olmo2", attention__sliding_window=WINDOW), False),
    (renamed("llama", attention__sliding_window=WINDOW), True), (renamed("granite"), True),
    (renamed("granite", rope__scaling__finetuned=(BOOL, False)), True),
])  # fmt: skip
def test_window_patterns_are_accepted_or_refused(tmp_path: Path, file: GGUF, accepted: bool) -> None:
    path = file.write(tmp_path / "m.gguf")
    if accepted:
        assert spec_of(path).layers == 2
    else:
        with pytest.raises(EdgeError):
            spec_of(path)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_architecture_reads_its_header(tmp_path: Path, architecture: str) -> None:
    assert spec_of(renamed(architecture).write(tmp_path / "m.gguf")).architecture == architecture


IMPOSSIBLE = [  # a golden model, a figure, its value, and words
    ("qwen3moe", "expert_used_count", 5, "5 of 4 experts"), ("qwen3moe", "expert_group_count", 3, "of 4 experts"),
    ("qwen3moe", "expert_feed_forward_length", 1 << 30, "must be from"),
    ("ling", "expert_group_count", 3, "2 of 8 experts for a token, in 2 of 3 groups"),
    ("qwen35", "ssm.group_count", 3, "delta net"), ("qwen35", "ssm.inner_size", 33, "delta net"),
    ("qwen35", "ssm.state_size", 1 << 20, "must be from"), ("qwen35", "ssm.conv_kernel", 1, "must be 2 or more"),
    ("mtp", "nextn_predict_layers", 3, "nextn_predict_layers is 3 of 3 layers"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "value", "says"), IMPOSSIBLE)
def test_impossible_figures_are_refused(name: str, key: str, value: int, says: str, tmp_path: Path) -> None:
    file = GGUF.read(GOLDEN / f"{name}.gguf")
    file.metadata[f"{file.metadata['general.architecture'][1]}.{key}"] = (U32, value)
    with pytest.raises(ModelFormatError, match=says):
        open_model(file.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(("name", "tensor", "shape", "says"), [
    ("minicpm3", "attn_kv_b", (32, 64), r"has shape \(32, 64\) instead of \(32, 96\)"),
    ("qwen3moe", "ffn_up_exps", (16, 32, 2), r"has shape \(16, 32, 2\) instead of \(16, 16, 4\)"),
])  # fmt: skip
def test_matrices_of_other_shapes_are_refused(
    name: str, tensor: str, shape: tuple[int, ...], says: str, tmp_path: Path
) -> None:
    file = GGUF.read(GOLDEN / f"{name}.gguf")
    _, kind, data = file.tensors[f"blk.0.{tensor}.weight"]
    file.tensors[f"blk.0.{tensor}.weight"] = (shape, kind, data[: 4 * math.prod(shape)])
    with pytest.raises(ModelFormatError, match=f"{tensor}.weight {says}"):
        load_engine(open_model(file.write(tmp_path / "m.gguf")), "reference", "f32")
