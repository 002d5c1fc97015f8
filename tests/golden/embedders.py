"""Make the golden embedders and rerankers: tiny random models as Hugging Face folders, and transformers' answers.

Run it as `make golden` does; it needs torch, transformers, sentencepiece and tokenizers. It writes, into the folder it
is given or beside itself, in `embedders/`:

    NAME/      a model with its tokenizer, as sentence-transformers or transformers write it
    NAME.npz   of every text in `TEXTS`: ids, int32, joined, and sizes; and
               of an embedder: vectors [texts, size], pooled, behind its dense layers, not scaled
               of a reranker: scores [texts], relevance to `QUERY`
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import sentencepiece
import torch
import transformers as hf
from encoders import word_pieces, write_json, write_modules
from families import small
from folders import gemma3, sentencepiece_bpe
from make import fill
from safetensors.torch import save_file
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from write import run

QUERY = "How is a function called?"
TEXTS = [
    "The sky is blue.", "Il cielo è blu, and naïve cafés are open!", "x",
    "An import statement binds names in the local namespace.",
    "The following example shows a function that is called with two arguments, and an exception that it raises.",
]  # fmt: skip
CONTEXT, VOCAB = 96, 400
RULES = {
    "\uff21": "A",
    "\ufb01": "fi",
    "\xa0": " ",
    "\u2026": "...",
}  # of SentencePiece's normalization: character, text
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": CONTEXT, "attn_implementation": "eager",
}  # fmt: skip


def main(out: Path) -> None:
    out = out / "embedders"
    out.mkdir(exist_ok=True)
    makers = (bert_ranker, xlm_roberta, xlm_ranker, modern_bert, modern_ranker, gemma, qwen3_ranker)
    for seed, make in enumerate(makers, start=301):
        name = make.__name__.replace("_", "-")
        model, tokenizer, pooling = make()
        model = fill(model.eval(), seed)
        (out / name).mkdir(exist_ok=True)
        copy.deepcopy(model).half().save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
        for weight in model.parameters():  # answers are those of the values in the folder; RoPE's stay float32
            weight.copy_(weight.half())
        dense = add_modules(out / name, pooling, seed) if pooling else []
        if name == "gemma":
            path = out / name / "config.json"  # as published: transformers halves the window when it reads
            write_json(path, json.loads(path.read_text()) | {"sliding_window": 8})
        if name == "qwen3-ranker":
            found = answers_of(model, tokenizer)
        elif pooling:
            found = vectors_of(model, tokenizer, pooling, dense)
        else:
            found = scores_of(model, tokenizer)
        np.savez_compressed(out / f"{name}.npz", **found)


Made = tuple[hf.PreTrainedModel, hf.PreTrainedTokenizerFast, str]  # with the pooling; "": a reranker


def bert_ranker() -> Made:
    tokenizer = word_pieces(lowercase=True)
    return hf.BertForSequenceClassification(
        hf.BertConfig(**SIZES, vocab_size=len(tokenizer), num_labels=1)), tokenizer, ""  # fmt: skip


def xlm_config(tokenizer: hf.PreTrainedTokenizerFast, **others: Any) -> hf.XLMRobertaConfig:
    sizes = SIZES | {"max_position_embeddings": CONTEXT + 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    return hf.XLMRobertaConfig(**sizes, vocab_size=len(tokenizer), **others)


def xlm_roberta() -> Made:
    tokenizer = unigrams()
    return hf.XLMRobertaModel(xlm_config(tokenizer), add_pooling_layer=False), tokenizer, "cls"


def xlm_ranker() -> Made:
    tokenizer = unigrams()
    return hf.XLMRobertaForSequenceClassification(xlm_config(tokenizer, num_labels=1)), tokenizer, ""


def modern(**others: Any) -> hf.ModernBertConfig:
    return hf.ModernBertConfig(
        **SIZES | {"num_hidden_layers": 4}, vocab_size=VOCAB, local_attention=8, global_attn_every_n_layers=3,
        pad_token_id=1, cls_token_id=2, bos_token_id=2, sep_token_id=3, eos_token_id=3, reference_compile=False,
        **others,
    )  # fmt: skip


def modern_bert() -> Made:
    return hf.ModernBertModel(modern()), byte_level(), "mean"


def modern_ranker() -> Made:
    return hf.ModernBertForSequenceClassification(modern(num_labels=1, classifier_pooling="mean")), byte_level(), ""


def gemma() -> Made:
    tokenizer = sentencepiece_bpe(gemma=True)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    config = small(hf.Gemma3TextConfig, **gemma3(sliding_window=8), vocab_size=len(tokenizer),
                   use_bidirectional_attention=True)  # fmt: skip
    return hf.Gemma3TextModel(config), tokenizer, "mean"


def qwen3_ranker() -> Made:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    tokenizer = bpe(special, qwen=True)
    tokenizer.normalizer = normalizers.NFC()
    made = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    config = small(hf.Qwen3Config, head_dim=16, theta=1e6, vocab_size=len(made), bos_token_id=0, eos_token_id=2)
    return hf.Qwen3ForCausalLM(config), made, ""


def bpe(special: list[str], *, qwen: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not qwen)
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    words += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(words), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain]) if qwen else plain
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([*lines(), *["yes", "no"] * 500], trainer)
    return tokenizer


def byte_level() -> hf.PreTrainedTokenizerFast:
    """ModernBERT's kind."""
    tokenizer = bpe(["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"], qwen=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip


def unigrams() -> hf.PreTrainedTokenizerFast:
    """XLM-R's kind, with a small table of characters that SentencePiece compiles."""
    with TemporaryDirectory() as work:
        folder = Path(work)
        rules = [(" ".join(f"{ord(char):X}" for char in one), " ".join(f"{ord(char):X}" for char in text))
                 for one, text in RULES.items()]  # fmt: skip
        (folder / "rules.tsv").write_text("".join(f"{one}\t{text}\n" for one, text in rules))
        (folder / "text").write_text("\n".join(lines()))
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text"), model_prefix=str(folder / "m"), vocab_size=VOCAB, model_type="unigram",
            normalization_rule_tsv=str(folder / "rules.tsv"), minloglevel=2, num_threads=1,
        )  # fmt: skip
        said = sentencepiece_model_pb2.ModelProto()
        said.ParseFromString((folder / "m.model").read_bytes())
    own = [(piece.piece, piece.score) for piece in said.pieces if piece.type == 1]
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *own, ("<mask>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, 3, False))
    tokenizer.normalizer = normalizers.Precompiled(said.normalizer_spec.precompiled_charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens([AddedToken(text) for text in ("<s>", "<pad>", "</s>", "<unk>")])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", cls_token="<s>", sep_token="</s>",
        unk_token="<unk>", pad_token="<pad>", mask_token="<mask>",
    )  # fmt: skip


def lines() -> list[str]:
    return [line for _, text in sorted(topics.items()) for line in text.splitlines() if line.strip()][:4000]


def add_modules(folder: Path, pooling: str, seed: int) -> list[torch.Tensor]:
    """As sentence-transformers writes them; of Gemma two dense layers, which are returned, and prompts."""
    if folder.name != "gemma":
        write_modules(folder, 32, pooling)
        return []
    write_modules(folder, 32, pooling, "2_Dense", "3_Dense")
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    random, found = np.random.default_rng(seed), []
    for place, (rows, columns) in (("2_Dense", (48, 32)), ("3_Dense", (32, 48))):
        weight = torch.from_numpy(random.standard_normal((rows, columns)) / np.sqrt(columns)).half()
        linear = "torch.nn.modules.linear.Identity"
        said = {"in_features": columns, "out_features": rows, "bias": False, "activation_function": linear}
        write_json(folder / place / "config.json", said)
        save_file({"linear.weight": weight}, folder / place / "model.safetensors")
        found.append(weight.float())
    return found


def vectors_of(
    model: hf.PreTrainedModel, tokenizer: hf.PreTrainedTokenizerFast, pooling: str, dense: list[torch.Tensor]
) -> dict[str, Any]:
    texts = [tokenizer(text).input_ids for text in TEXTS]
    vectors = []
    for ids in texts:
        states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        vector = states[0] if pooling == "cls" else states.mean(axis=0)
        for weight in dense:
            vector = weight @ vector
        vectors.append(vector.numpy())
    return joined(texts) | {"vectors": np.stack(vectors)}


def scores_of(model: hf.PreTrainedModel, tokenizer: hf.PreTrainedTokenizerFast) -> dict[str, Any]:
    pairs = [tokenizer(QUERY, text) for text in TEXTS]
    scores = []
    for pair in pairs:
        given = {name: torch.tensor([ids]) for name, ids in pair.items() if name != "attention_mask"}
        if "token_type_ids" in given and getattr(model.config, "type_vocab_size", 0) < 2:
            del given["token_type_ids"]
        scores.append(torch.sigmoid(model(**given).logits[0, 0]).item())
    return joined([pair.input_ids for pair in pairs]) | {"scores": np.array(scores, np.float32)}


def answers_of(model: hf.PreTrainedModel, tokenizer: hf.PreTrainedTokenizerFast) -> dict[str, Any]:
    """As Qwen3-Reranker's authors compute them."""
    (yes,), (no,) = (tokenizer(answer).input_ids for answer in ("yes", "no"))
    before, behind = (tokenizer(text).input_ids for text in (BEFORE, BEHIND))
    prompts, scores = [], []
    for text in TEXTS:
        body = f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {text}"
        prompts.append(before + tokenizer(body).input_ids + behind)
        logits = model(input_ids=torch.tensor([prompts[-1]])).logits[0, -1]
        scores.append(torch.softmax(logits[[no, yes]], 0)[1].item())
    return joined(prompts) | {"scores": np.array(scores, np.float32)}


def joined(texts: list[list[int]]) -> dict[str, Any]:
    return {"ids": np.concatenate(texts).astype(np.int32), "sizes": np.array([len(ids) for ids in texts], np.int32)}


if __name__ == "__main__":
    run(main)
