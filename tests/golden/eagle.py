"""Train a tiny EAGLE-3 head for the model in `mtp.gguf`, so that tests have drafts that are right.

    PYTHONPATH=tests:tests/formats:tests/golden PYTHON tests/golden/eagle.py [OUT]

needs torch and safetensors, and takes a minute. It writes

    folders/eagle3/     config.json, model.safetensors with SpecForge's names
    folders/eagle3.npz  tokens, int32 [48]; logits [8, rows] behind the last 8 features, and the logits [rows]
                        and the state [hidden] behind one more row, of its own state behind the last feature and the
                        token in `next`

The formulas are those of the paper (arXiv:2503.01840) and of SpecForge's and vLLM's models, written out in torch: RoPE
pairs halves, and the decoder's attention reads the norms of embedding and features side by side.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from mtp import GOLDEN, HIDDEN, LENGTH, layer, rms, sentences
from safetensors.torch import save_file
from torch import Tensor

from edge.model.model import open_model

HEADS, KV_HEADS, SIZE, FFN = 2, 1, 16, 32
STEPS, BATCH, SEQUENCES = 800, 16, 384
TOKENS, LAST = 48, 8
LAYERS = [0, 1]  # of the model, whose inputs are features


def model_weights() -> dict[str, Tensor]:
    reader = gguf.GGUFReader(GOLDEN / "mtp.gguf")
    found = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(np.array(tensor.data, np.float32))
        found[tensor.name.removesuffix(".weight")] = values
    return found


def features(tokens: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The features of tokens [batch, length], and the model's likeliest next token."""
    first = w["token_embd"][tokens]
    second = layer(first, w, 0)
    last = rms(layer(second, w, 1), w["output_norm"])
    return torch.cat([first, second], -1), (last @ w["token_embd"].T).argmax(-1)


def first_weights(rows: int) -> dict[str, Tensor]:
    torch.manual_seed(2)
    shapes = {
        "fc.weight": (HIDDEN, len(LAYERS) * HIDDEN),
        "midlayer.input_layernorm.weight": (HIDDEN,), "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (HEADS * SIZE, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * SIZE, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * SIZE, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.mlp.gate_proj.weight": (FFN, HIDDEN), "midlayer.mlp.up_proj.weight": (FFN, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, FFN), "norm.weight": (HIDDEN,), "lm_head.weight": (rows, HIDDEN),
    }  # fmt: skip
    drawn = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    ones = {name: 1 + 0.1 * torch.randn(shape) for name, shape in shapes.items() if len(shape) == 1}
    return {name: values.requires_grad_() for name, values in (drawn | ones).items()}


def rotate(x: Tensor) -> Tensor:
    """x: [batch, heads, length, size]."""
    half = SIZE // 2
    angles = torch.arange(x.shape[2])[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    cos, sin = (torch.cat([each, each], -1) for each in (angles.cos(), angles.sin()))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def head(embeddings: Tensor, g: Tensor, w: dict[str, Tensor]) -> Tensor:
    """The states behind the decoder layer, [batch, length, hidden]."""
    batch, length, _ = g.shape
    joined = torch.cat(
        [rms(embeddings, w["midlayer.input_layernorm.weight"]), rms(g, w["midlayer.hidden_norm.weight"])], -1
    )
    queries, keys, values = (
        (joined @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(batch, length, heads, SIZE).transpose(1, 2)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    queries, keys = rotate(queries), rotate(keys)
    heads = (queries, keys.expand_as(queries), values.expand_as(queries))
    out = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
    x = g + out @ w["midlayer.self_attn.o_proj.weight"].T
    normed = rms(x, w["midlayer.post_attention_layernorm.weight"])
    inner = F.silu(normed @ w["midlayer.mlp.gate_proj.weight"].T) * (normed @ w["midlayer.mlp.up_proj.weight"].T)
    return x + inner @ w["midlayer.mlp.down_proj.weight"].T


def logits_of(states: Tensor, w: dict[str, Tensor]) -> Tensor:
    return rms(states, w["norm.weight"]) @ w["lm_head.weight"].T


def train(ids: np.ndarray, model: dict[str, Tensor], w: dict[str, Tensor], rows: Tensor) -> None:
    """rows: the head's row of each token, −1 for none."""
    text = torch.from_numpy(ids.astype(np.int64))
    starts = torch.randint(len(text) - LENGTH - 2, (SEQUENCES,))
    tokens = text[starts[:, None] + torch.arange(LENGTH)]
    with torch.no_grad():
        f, following = features(tokens, model)
    optimizer = torch.optim.AdamW(w.values(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, STEPS)
    wanted = rows[following]  # after token t; the head has features up to t and token t + 1
    for step in range(STEPS):
        part = torch.randint(SEQUENCES, (BATCH,))
        g, e = f[part, :-1] @ w["fc.weight"].T, model["token_embd"][tokens[part, 1:]]
        found = head(e, g, w)
        again = head(e[:, 1:], found[:, :-1], w)
        losses = [
            F.cross_entropy(logits_of(each, w).flatten(0, 1), wanted[part, at:].flatten(), ignore_index=-1)
            for at, each in ((1, found), (2, again))
        ]
        optimizer.zero_grad()
        sum(losses).backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            right = (logits_of(found, w).argmax(-1) == wanted[part, 1:]).float().mean().item()
            print(step, *(f"{each.item():.3f}" for each in losses), f"{right:.2f}", flush=True)


def write(folder: Path, w: dict[str, Tensor], known: np.ndarray, vocab: int) -> None:
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 512, "vocab_size": vocab, "draft_vocab_size": len(known),
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": LAYERS,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: values.detach().to(torch.bfloat16) for name, values in w.items()}
    tensors["d2t"] = torch.from_numpy(known - np.arange(len(known)))
    tensors["t2d"] = torch.from_numpy(np.isin(np.arange(vocab), known))
    save_file(tensors, folder / "model.safetensors")


def main(out: Path) -> None:
    torch.set_num_threads(1)
    source, tokenizer = random.Random(1), open_model(GOLDEN / "mtp.gguf").tokenizer
    ids, model = np.array(tokenizer.encode(sentences(source, 4000)), np.int32), model_weights()
    vocab, known = len(model["token_embd"]), np.unique(ids)
    rows = torch.full((vocab,), -1)
    rows[torch.from_numpy(known.astype(np.int64))] = torch.arange(len(known))
    w = first_weights(len(known))
    train(ids, model, w, rows)
    folder = out / "folders" / "eagle3"
    with torch.no_grad():
        for weight in w.values():
            weight.copy_(weight.to(torch.bfloat16).float())
        write(folder, w, known.astype(np.int64), vocab)
        tokens = torch.from_numpy(ids[:TOKENS].astype(np.int64))[None]
        f, _ = features(tokens, model)
        g, e = f[:, :-1] @ w["fc.weight"].T, model["token_embd"][tokens[:, 1:]]
        states = head(e, g, w)
        logits = logits_of(states, w)[0]
        following = int(known[int(logits[-1].argmax())])
        own = torch.cat([e, model["token_embd"][torch.tensor([[following]])]], 1), torch.cat([g, states[:, -1:]], 1)
        chained = head(*own, w)[0, -1]
        np.savez_compressed(
            folder.with_suffix(".npz"), tokens=ids[:TOKENS], logits=logits[-LAST:].numpy(), next=following,
            chained=logits_of(chained, w).numpy(), state=chained.numpy(),
        )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN)
