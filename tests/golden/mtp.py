"""Train a tiny Qwen3.5 with its layer for multi-token prediction, so that tests have drafts that are right.

    PYTHONPATH=tests:tests/formats PYTHON tests/golden/mtp.py [OUT]

needs torch, and takes some minutes. It writes `mtp.gguf`, matrices in float16, and `mtp.npz`: tokens, int32 [48]; the
model's logits after the last 8, float32 [8, vocab]; and the layer's, from the model's states and the tokens behind them
(`drafts`), and a second time from its own states (`chained`), [7, vocab] each.

The text is made here, sentence by sentence, of a small vocabulary. The vocabulary of tokens is that of `qwen35.gguf`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from test_gguf_file import GGUF
from torch import Tensor

from edge.model.model import open_model

GOLDEN = Path(__file__).parent
HIDDEN, FFN, HEADS, SIZE, ROTATED, KERNEL = 64, 64, 2, 16, 8, 4
STEPS, BATCH, LENGTH = 400, 24, 64
TOKENS, LAST = 48, 8
F32, F16, U32, BOOL, ARRAY = 0, 1, 4, 7, 9
MIXED, WIDTH = 2 * SIZE + HEADS * SIZE, HEADS * SIZE

WHO = ["the old fox", "a young sailor", "my sister", "the quiet farmer", "our teacher", "a small bird"]
DOES = ["looks for", "talks about", "walks around", "waits behind", "thinks of", "comes back to"]
WHAT = ["the red house", "the river", "an empty garden", "the long road", "the market", "a wooden boat"]
WHEN = ["in the morning", "before the rain", "at the end of the day", "every summer", "without a word"]


def sentences(source: random.Random, count: int) -> str:
    """Three of four words follow from those before. Sentences whose subject and object have the same place in their
    lists are held out, for tests."""

    def choose(usual: int, words: list[str], *never: int) -> int:
        others = [index for index in range(len(words)) if index not in never]
        return usual % len(words) if source.random() < 0.75 else source.choice(others)

    found, who = [], 0
    for _ in range(count):
        who = choose(who + 1, WHO)
        does = choose(who + 2, DOES)
        what = choose(who + 3, WHAT, who)
        when = choose(does + what, WHEN)
        found.append(f"{WHO[who]} {DOES[does]} {WHAT[what]} {WHEN[when]}. ")
    return "".join(found)


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the file, as torch has them: [rows, columns]."""
    dense = {
        "post_attention_norm": (HIDDEN,), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
    }  # fmt: skip
    delta = {
        "attn_norm": (HIDDEN,), "attn_qkv": (MIXED, HIDDEN), "attn_gate": (WIDTH, HIDDEN), "ssm_beta": (HEADS, HIDDEN),
        "ssm_alpha": (HEADS, HIDDEN), "ssm_conv1d": (MIXED, KERNEL), "ssm_dt.bias": (HEADS,), "ssm_a": (HEADS,),
        "ssm_norm": (SIZE,), "ssm_out": (HIDDEN, WIDTH),
    }  # fmt: skip
    attention = {
        "attn_norm": (HIDDEN,), "attn_q": (2 * WIDTH, HIDDEN), "attn_k": (SIZE, HIDDEN), "attn_v": (SIZE, HIDDEN),
        "attn_q_norm": (SIZE,), "attn_k_norm": (SIZE,), "attn_output": (HIDDEN, WIDTH),
    }  # fmt: skip
    mtp = {
        "nextn.enorm": (HIDDEN,), "nextn.hnorm": (HIDDEN,), "nextn.eh_proj": (HIDDEN, 2 * HIDDEN),
        "nextn.shared_head_norm": (HIDDEN,),
    }  # fmt: skip
    layers = [delta | dense, attention | dense, attention | dense | mtp]
    found: dict[str, tuple[int, ...]] = {"token_embd": (272, HIDDEN), "output_norm": (HIDDEN,)}
    return found | {f"blk.{at}.{name}": shape for at, layer in enumerate(layers) for name, shape in layer.items()}


def first_weights() -> dict[str, Tensor]:
    torch.manual_seed(1)
    found = {}
    for name, shape in shapes().items():
        drawn = torch.randn(shape)
        if name.endswith("norm"):
            drawn = torch.ones(shape)
        elif name.endswith(("ssm_a", "dt.bias")):
            drawn = -torch.rand(shape) - 0.5
        elif name.endswith("ssm_conv1d"):
            drawn = drawn * 0.5
        else:
            drawn = drawn * (0.05 if name == "token_embd" else shape[-1] ** -0.5)
        found[name] = drawn.requires_grad_()
    return found


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: Tensor) -> Tensor:
    """x: [batch, length, heads, size]. Pairs are halves of the first `ROTATED` values."""
    half = ROTATED // 2
    angles = torch.arange(x.shape[1])[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, two, rest = x.split([half, half, x.shape[-1] - ROTATED], -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1)


def attention(x: Tensor, w: dict[str, Tensor], at: str) -> Tensor:
    batch, length, _ = x.shape
    queries, gate = (x @ w[f"{at}.attn_q"].T).view(batch, length, HEADS, 2 * SIZE).chunk(2, -1)
    keys, values = ((x @ w[f"{at}.attn_{name}"].T).view(batch, length, 1, SIZE) for name in "kv")
    queries, keys = rotate(rms(queries, w[f"{at}.attn_q_norm"])), rotate(rms(keys, w[f"{at}.attn_k_norm"]))
    heads = (each.transpose(1, 2) for each in (queries, keys.expand_as(queries), values.expand_as(queries)))
    out = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    return (out * gate.sigmoid()).reshape(batch, length, WIDTH) @ w[f"{at}.attn_output"].T


def delta_net(x: Tensor, w: dict[str, Tensor], at: str) -> Tensor:
    batch, length, _ = x.shape
    mixed = F.pad((x @ w[f"{at}.attn_qkv"].T).transpose(1, 2), (KERNEL - 1, 0))
    mixed = F.silu(F.conv1d(mixed, w[f"{at}.ssm_conv1d"][:, None], groups=MIXED)).transpose(1, 2)
    queries, keys, values = mixed.split([SIZE, SIZE, WIDTH], -1)
    queries, keys = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (queries, keys))
    queries, values = queries * SIZE**-0.5, values.view(batch, length, HEADS, SIZE)
    steps = F.softplus(x @ w[f"{at}.ssm_alpha"].T + w[f"{at}.ssm_dt.bias"])
    decay, beta = (w[f"{at}.ssm_a"] * steps).exp(), (x @ w[f"{at}.ssm_beta"].T).sigmoid()
    memory, out = torch.zeros(batch, HEADS, SIZE, SIZE), []
    for token in range(length):
        q, k = queries[:, token, None, :, None], keys[:, token, None, :, None]
        memory = memory * decay[:, token, :, None, None]
        change = beta[:, token, :, None] * (values[:, token] - (memory * k).sum(2))
        memory = memory + k * change[:, :, None]
        out.append((memory * q).sum(2))
    normed = rms(torch.stack(out, 1), w[f"{at}.ssm_norm"]).reshape(batch, length, WIDTH)
    return (normed * F.silu(x @ w[f"{at}.attn_gate"].T)) @ w[f"{at}.ssm_out"].T


def layer(x: Tensor, w: dict[str, Tensor], number: int) -> Tensor:
    at = f"blk.{number}"
    core = delta_net if number == 0 else attention
    x = x + core(rms(x, w[f"{at}.attn_norm"]), w, at)
    normed = rms(x, w[f"{at}.post_attention_norm"])
    return x + (F.silu(normed @ w[f"{at}.ffn_gate"].T) * (normed @ w[f"{at}.ffn_up"].T)) @ w[f"{at}.ffn_down"].T


def states(tokens: Tensor, w: dict[str, Tensor]) -> Tensor:
    """The model's normalised states, [batch, length, hidden]; times the embedding they are logits."""
    return rms(layer(layer(w["token_embd"][tokens], w, 0), w, 1), w["output_norm"])


def predicted(before: Tensor, tokens: Tensor, w: dict[str, Tensor]) -> Tensor:
    """The same of the layer for multi-token prediction, from states and the tokens behind them."""
    normed = rms(w["token_embd"][tokens], w["blk.2.nextn.enorm"]), rms(before, w["blk.2.nextn.hnorm"])
    joined = torch.cat(normed, -1) @ w["blk.2.nextn.eh_proj"].T
    return rms(layer(joined, w, 2), w["blk.2.nextn.shared_head_norm"])


def train(ids: np.ndarray, w: dict[str, Tensor]) -> None:
    text = torch.from_numpy(ids.astype(np.int64))
    optimizer = torch.optim.AdamW(w.values(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, STEPS)
    for step in range(STEPS):
        starts = torch.randint(len(text) - LENGTH - 2, (BATCH,))
        rows = text[starts[:, None] + torch.arange(LENGTH + 2)]
        h = states(rows[:, :LENGTH], w)
        m = predicted(h, rows[:, 1 : LENGTH + 1], w)
        losses = [F.cross_entropy((each @ w["token_embd"].T).flatten(0, 1), rows[:, at : at + LENGTH].flatten())
                  for at, each in ((1, h), (2, m))]  # fmt: skip
        optimizer.zero_grad()
        (losses[0] + losses[1]).backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(step, *(f"{each.item():.3f}" for each in losses), flush=True)


def write(path: Path, w: dict[str, Tensor]) -> None:
    file = GGUF.read(GOLDEN / "qwen35.gguf")
    counts = {"block_count": 3, "nextn_predict_layers": 1, "embedding_length": HIDDEN, "feed_forward_length": FFN}
    file.metadata |= {f"qwen35.{name}": (U32, value) for name, value in counts.items()}
    file.metadata["qwen35.attention.recurrent_layers"] = (ARRAY, (BOOL, [True, False, False]))
    del file.metadata["general.size_label"]
    file.tensors = {}
    for name, weight in w.items():
        vector = weight.ndim == 1 or name.endswith("ssm_conv1d")
        shape = tuple(reversed(weight.shape))
        data = weight.detach().numpy().astype("<f4" if vector else "<f2").tobytes()
        name = name if name.endswith(".bias") or name.endswith("ssm_a") else f"{name}.weight"
        file.tensors[name] = (shape, F32 if vector else F16, data)
    file.write(path)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    source, tokenizer = random.Random(1), open_model(GOLDEN / "qwen35.gguf").tokenizer
    ids = np.array(tokenizer.encode(sentences(source, 4000)), np.int32)
    w = first_weights()
    train(ids, w)
    with torch.no_grad():
        for name, weight in w.items():
            if weight.ndim == 2 and not name.endswith("ssm_conv1d"):
                weight.copy_(weight.half().float())
        write(out / "mtp.gguf", w)
        tokens = torch.from_numpy(ids[:TOKENS].astype(np.int64))[None]
        h = states(tokens, w)
        drafted = predicted(h[:, :-1], tokens[:, 1:], w)
        again = predicted(drafted[:, :-1], tokens[:, 2:], w)
        logits = {
            name: (each[0] @ w["token_embd"].T)[-count:].numpy()
            for name, each, count in (("logits", h, LAST), ("drafts", drafted, LAST), ("chained", again, LAST))
        }
    np.savez_compressed(out / "mtp.npz", tokens=ids[:TOKENS], **logits)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN)
