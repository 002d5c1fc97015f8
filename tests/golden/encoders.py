"""Make the golden encoders: tiny random ones, the ids of their WordPiece tokenizers, and transformers' embeddings.

Run it as `make golden` does; it needs torch, transformers, gguf and tokenizers. It writes, into the folder it is given
or beside itself, in `encoders/`:

    NAME.gguf       a model in float32, as llama.cpp's converter writes it
    NAME.npz        of every text in `SENTENCES`: mean, cls [texts, hidden], not scaled; ids, int32, joined, and sizes;
                    states [tokens, hidden] of the last text
    NAME/           the same model as a Hugging Face folder, of those in `FOLDERS`
    tokenizer.json  the texts of `torture.py` with the ids of each tokenizer
"""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gguf
import numpy as np
import torch
from gguf import TokenType
from tokenizers import BertWordPieceTokenizer
from torture import TEXTS
from transformers import BertConfig, BertModel, BertTokenizerFast, NomicBertConfig, NomicBertModel, PreTrainedModel
from write import begin, finish, run

SENTENCES = [
    "The sky is blue.", "Il cielo è blu, and naïve cafés are open!", "x",
    "\u4f60\u597d, world: an import statement binds names in the local namespace.",
    "The following example shows a function that is called with two arguments, and an exception that it raises.",
]  # fmt: skip
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CONTEXT = 96
FOLDERS = {"bert": "mean", "bert-cased": "cls"}  # and their pooling
POOLING = {"mean": gguf.PoolingType.MEAN, "cls": gguf.PoolingType.CLS}
NOMIC_NAMES = {  # of layers; the rest has BERT's
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "attn_output_norm", "post_mlp_layernorm": "layer_output_norm",
}  # fmt: skip


def main(out: Path) -> None:
    out = out / "encoders"
    out.mkdir(exist_ok=True)
    tokenizers = {"bert": word_pieces(lowercase=True), "bert-cased": word_pieces(lowercase=False)}
    tokenizers["nomic-bert"] = tokenizers["bert"]
    for seed, (name, tokenizer) in enumerate(tokenizers.items(), start=91):
        model = make_model(name, len(tokenizer), seed)
        if name in FOLDERS:
            write_folder(out / name, model.half(), tokenizer, FOLDERS[name])
        model = model.float()  # transformers' answers are those of the values in the folder
        write_gguf(out / f"{name}.gguf", model, tokenizer, FOLDERS.get(name, "mean"))
        np.savez_compressed(out / f"{name}.npz", **answers(model, tokenizer))
    cases = [{"text": text, **{name: ids_of(tokenizers[name], text) for name in FOLDERS}} for text in TEXTS]
    (out / "tokenizer.json").write_text(json.dumps(cases), encoding="utf-8")


def word_pieces(*, lowercase: bool) -> BertTokenizerFast:
    """A vocabulary of 480 from Python's own manual and the torture texts."""
    lines = [line for _, text in sorted(topics.items()) for line in text.splitlines()]
    trained = BertWordPieceTokenizer(lowercase=lowercase)
    trained.train_from_iterator(
        lines + [each for each in TEXTS if len(each) < 80], vocab_size=480, limit_alphabet=200, special_tokens=SPECIAL,
        show_progress=False,
    )  # fmt: skip
    return BertTokenizerFast(tokenizer_object=trained._tokenizer, do_lower_case=lowercase, model_max_length=CONTEXT)


def ids_of(tokenizer: BertTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, truncation=False, verbose=False).input_ids


def make_model(name: str, vocab: int, seed: int) -> PreTrainedModel:
    sizes: dict[str, Any] = {"vocab_size": vocab, "max_position_embeddings": CONTEXT, "type_vocab_size": 2,
                             "num_attention_heads": 2, "attn_implementation": "eager"}  # fmt: skip
    if name == "nomic-bert":
        config = NomicBertConfig(**sizes, hidden_size=32, num_hidden_layers=2, intermediate_size=64)
        model: PreTrainedModel = NomicBertModel(config, add_pooling_layer=False)
    elif name == "bert-cased":  # heads of 24 values are no whole vectors
        config = BertConfig(**sizes, hidden_size=48, num_hidden_layers=1, intermediate_size=64, layer_norm_eps=1e-5)
        model = BertModel(config, add_pooling_layer=False)
    else:
        config = BertConfig(**sizes, hidden_size=32, num_hidden_layers=2, intermediate_size=64)
        model = BertModel(config, add_pooling_layer=False)
    random = np.random.default_rng(seed)
    for parameter, weight in model.named_parameters():
        drawn = random.standard_normal(weight.shape)
        if weight.ndim == 1:  # norms and biases
            drawn = 1 + 0.2 * drawn if "norm" in parameter.lower() and parameter.endswith(".weight") else 0.5 * drawn
        else:
            drawn *= (3.0 if "embeddings" in parameter else 1.2) / np.sqrt(weight.shape[-1])
        weight.copy_(torch.from_numpy(drawn))
    return model.eval()


def write_folder(folder: Path, model: PreTrainedModel, tokenizer: BertTokenizerFast, pooling: str) -> None:
    """As sentence-transformers writes it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_modules(folder, model.config.hidden_size, pooling)


def write_modules(folder: Path, size: int, pooling: str, *dense: str) -> None:
    """dense: the folders of layers behind the pooling."""
    places = ["", "1_Pooling", *dense, f"{2 + len(dense)}_Normalize"]
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    modules = [
        {"idx": index, "name": str(index), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    write_json(folder / "modules.json", modules)
    modes = {f"pooling_mode_{name}": name.startswith(pooling) for name in ("cls_token", "mean_tokens", "max_tokens")}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": size, **modes})


def write_json(path: Path, said: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(said, indent=2) + "\n")


def write_gguf(path: Path, model: PreTrainedModel, tokenizer: BertTokenizerFast, pooling: str) -> None:
    config = model.config
    architecture = config.model_type.replace("_", "-")
    writer = begin(path, architecture, config)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(POOLING[pooling])
    if architecture == "nomic-bert":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    add_vocabulary(writer, tokenizer)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == "bert")
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.startswith("layers."):
            _, layer, *stem, suffix = name.split(".")
            ours = f"blk.{layer}.{NOMIC_NAMES['.'.join(stem)]}.{suffix}"
        writer.add_tensor(ours, np.ascontiguousarray(tensor.numpy()))
    finish(writer)


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: BertTokenizerFast) -> None:
    """Pieces that begin a word get a mark, and those that go on with one lose theirs."""
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    plain = [each if each in SPECIAL else each[2:] if each.startswith("##") else f"\u2581{each}" for each in tokens]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(plain)
    writer.add_token_types([TokenType.CONTROL if each in SPECIAL else TokenType.NORMAL for each in tokens])
    writer.add_token_type_count(2)
    writer.add_unk_token_id(tokenizer.unk_token_id)
    writer.add_sep_token_id(tokenizer.sep_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_bos_token_id(tokenizer.cls_token_id)
    writer.add_eos_token_id(tokenizer.sep_token_id)
    writer.add_mask_token_id(tokenizer.mask_token_id)


def answers(model: PreTrainedModel, tokenizer: BertTokenizerFast) -> dict[str, Any]:
    texts = [ids_of(tokenizer, text) for text in SENTENCES]
    states = [model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy() for ids in texts]
    return {
        "ids": np.concatenate(texts).astype(np.int32), "sizes": np.array([len(ids) for ids in texts], np.int32),
        "mean": np.stack([each.mean(axis=0) for each in states]), "cls": np.stack([each[0] for each in states]),
        "states": states[-1],
    }  # fmt: skip


if __name__ == "__main__":
    run(main)
