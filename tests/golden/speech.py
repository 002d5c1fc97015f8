"""What transformers hears with the golden Whisper, in a sound of several of its windows, greedily.

Run it as `make golden` does, after `hearing.py`. It writes `folders/speech.npz`, with the language that was detected,
and of each segment its start and end in hundredths of a second, and its tokens (joined, with their sizes).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from sounds import tone
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor, WhisperForConditionalGeneration

FOLDER = Path(__file__).parent / "folders"
SYMBOLS = "\"#()*+/:;<=>@[\\]^_`{|}~-'"


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    model = WhisperForConditionalGeneration.from_pretrained(FOLDER / "whisper").float().eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER / "whisper")
    ids = tokenizer.convert_tokens_to_ids
    first = ids("<|notimestamps|>") + 1
    config = model.generation_config
    settings = {
        "is_multilingual": True, "lang_to_id": {"<|en|>": ids("<|en|>"), "<|de|>": ids("<|de|>")},
        "task_to_id": {"transcribe": ids("<|transcribe|>"), "translate": ids("<|translate|>")},
        "no_timestamps_token_id": first - 1, "max_initial_timestamp_index": 50, "return_timestamps": True,
        "decoder_start_token_id": ids("<|startoftranscript|>"), "eos_token_id": ids("<|endoftext|>"),
        "pad_token_id": ids("<|endoftext|>"), "prev_sot_token_id": ids("<|startofprev|>"),
        "begin_suppress_tokens": [*tokenizer(" ")["input_ids"], ids("<|endoftext|>")], "forced_decoder_ids": None,
        "suppress_tokens": sorted({
            ids(name) for name in ("<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
                                   "<|startofprev|>", "<|nocaptions|>")
        } | {tokenizer(each)["input_ids"][0] for each in SYMBOLS if len(tokenizer(each)["input_ids"]) == 1}
          | {tokenizer(" " + each)["input_ids"][0] for each in "-'"}),
    }  # fmt: skip
    for name, value in settings.items():
        setattr(config, name, value)
    wave = tone()
    extractor = WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
    mel = extractor._np_extract_fbank_features(np.pad(wave, (0, 480000))[None], "cpu")[:, :, : wave.size // 160]
    mel = torch.from_numpy(np.asarray(mel, np.float32))
    frames = 2 * model.config.max_source_positions
    language = int(model.detect_language(mel[:, :, :frames])[0])
    found = model.generate(
        mel, attention_mask=torch.ones(1, mel.shape[-1]), return_segments=True, max_new_tokens=12, num_beams=1,
        do_sample=False, language=tokenizer.convert_ids_to_tokens(language), task="transcribe",
        condition_on_prev_tokens=False,
    )  # fmt: skip
    segments = found["segments"][0]
    times = [[round(100 * float(each[name])) for name in ("start", "end")] for each in segments]
    tokens = [each["tokens"].numpy().astype(np.int32) for each in segments]
    print(json.dumps([[time, each.tolist()] for time, each in zip(times, tokens, strict=True)]), language)
    np.savez_compressed(
        FOLDER / "speech.npz", language=language, times=times, tokens=np.concatenate(tokens),
        sizes=[each.size for each in tokens],
    )  # fmt: skip
