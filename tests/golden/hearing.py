"""Make the golden Whisper: a tiny random one in two formats, and what transformers makes of a spectrogram.

Run it as `make golden` does, with ctranslate2 beside transformers. It writes

    folders/whisper/     config.json, safetensors, tokenizer.json …, as transformers saves them
    folders/whisper.bin  the same weights as CTranslate2's converter writes them: its model.bin
    folders/whisper.npz  mel [bands, frames]; states [positions, hidden]; tokens [n]; logits [n, vocab]; paid
                         [layers, heads, n, positions], the cross attention

Weights are rounded to float16 first.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import ctranslate2
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, WhisperConfig, WhisperForConditionalGeneration
from write import CONTROL as NAMES
from write import MERGES, bytes_vocabulary

POSITIONS, CONTEXT, BANDS, TOKENS = 32, 24, 16, 12
CONTROL = ("<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
           "<|startofprev|>", "<|nocaptions|>", "<|notimestamps|>")  # fmt: skip


def main(folder: Path) -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    tokenizer = make_tokenizer()
    first, vocab = tokenizer.convert_tokens_to_ids("<|notimestamps|>") + 1, len(tokenizer) + POSITIONS + 1
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    config = WhisperConfig(
        vocab_size=vocab, num_mel_bins=BANDS, d_model=32, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=POSITIONS, max_target_positions=CONTEXT, pad_token_id=end, bos_token_id=end,
        eos_token_id=end, decoder_start_token_id=end + 1, begin_suppress_tokens=None, attn_implementation="eager",
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    for name, weight in model.named_parameters():
        drawn = torch.randn_like(weight) * (0.3 if weight.ndim > 1 else 0.2)
        if "positions" in name and "encoder" in name:
            continue
        weight.copy_(drawn + 1 if "layer_norm.weight" in name else drawn)
    model = model.half().float()
    target = folder / "whisper"
    shutil.rmtree(target, ignore_errors=True)
    model.half().save_pretrained(target)
    tokenizer.save_pretrained(target)
    generation = {"alignment_heads": [[0, 1], [1, 0]], "is_multilingual": True}
    (target / "generation_config.json").write_text(json.dumps(generation))
    with tempfile.TemporaryDirectory() as work:
        convert(target, Path(work) / "made")
        shutil.copyfile(Path(work) / "made" / "model.bin", folder / "whisper.bin")
    model = model.float()
    mel = np.random.default_rng(1).normal(0, 0.7, (BANDS, 2 * POSITIONS)).astype(np.float32)
    tokens = torch.tensor([[end + 1, first - 1, *torch.randint(0, end, (TOKENS - 2,)).tolist()]])
    answer = model(torch.from_numpy(mel)[None], decoder_input_ids=tokens, output_attentions=True)
    np.savez_compressed(
        folder / "whisper.npz", mel=mel, states=answer.encoder_last_hidden_state[0].numpy(),
        tokens=tokens[0].numpy().astype(np.int32), logits=answer.logits[0].numpy(),
        paid=torch.cat(answer.cross_attentions).numpy(),
    )  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, some merges, and control tokens without timestamps, as published tokenizers have them."""
    texts = [text for text in bytes_vocabulary() if text not in NAMES]
    merges = [tuple(each.split(" ")) for each in MERGES]
    merger = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(texts)}, merges=merges))
    merger.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    merger.decoder = decoders.ByteLevel()
    merger.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", *CONTROL)])
    return PreTrainedTokenizerFast(tokenizer_object=merger, eos_token="<|endoftext|>", bos_token="<|endoftext|>")


def convert(folder: Path, made: Path) -> None:
    """CTranslate2's converter, which asks transformers for a processor: it reads the tokenizer alone."""
    loader = ctranslate2.converters.transformers.WhisperLoader
    loader.get_vocabulary = lambda _self, model, _tokenizer: [str(number) for number in range(model.config.vocab_size)]
    converter = ctranslate2.converters.TransformersConverter(str(folder), low_cpu_mem_usage=False)
    converter.load_tokenizer = lambda _kind, name, **_more: PreTrainedTokenizerFast.from_pretrained(name)
    converter.convert(str(made), quantization="float16", force=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "folders")
