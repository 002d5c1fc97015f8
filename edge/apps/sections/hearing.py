"""What bundles of models that hear have besides: section HEARING of model.edge, the tokens of a transcript
(runtime/ears/hearing.h), and section STEM of ears.edge, the tables around the encoder (runtime/ears/stem.c).

The bundle's own network is the decoder, so that model.edge is as any other; the encoder is ears.edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from edge.apps.c_struct import c_struct, filled
from edge.backends.base import EngineConfig
from edge.backends.reference.weights import read_weight
from edge.backends.tvm import CPU
from edge.budget import format_bytes
from edge.devices.host import usable_cores
from edge.devices.memory import MemoryLimit, memory_limit
from edge.devices.profiles import HOST
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import BudgetError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.media.mel import HOP, mel_filters
from edge.model.model import Model
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.model.tokens.tokenizer import TokenizerLike
from edge.model.whisper import EARS, STEM, Whisper, ears_file, words_file
from edge.options import AUTO, Options
from edge.plan.device import limits_of
from edge.plan.plan import Plan, PlanBytes
from edge.run.senses.hearing import CHUNK
from edge.run.speech.plan import check_options
from edge.run.speech.rules import TokenRules
from edge.types import FloatArray

FASTEST = 192000  # samples per second: filters of faster sound take memory
PANEL = 8  # columns of a matrix that lie side by side
MOST_BANDS, MOST_FRAMES, MOST_TEXT_BYTES = 128, 3000, 1 << 20
ALIGNED = 8  # tokens around those of a text, whose attention across is looked at
SOUND = 4 << 20  # bytes of a session for sounds: filters of resampling, tables, bands of the convolutions
_CHARACTER = 64  # bytes beside a text's own

HEARING = c_struct(
    **dict.fromkeys(
        ("mels", "frames", "text_bytes", "sot", "eot", "translate", "transcribe", "prev", "no_speech",
         "first_timestamp", "never", "blank", "languages", "no_timestamps"), "<u4",
    )
)  # fmt: skip
STEM_CONFIG = c_struct(**dict.fromkeys(("mels", "hidden", "positions", "heads"), "<u4"))
STRUCTS = {"hearing_config": HEARING, "stem_config": STEM_CONFIG}  # by their names in C


@dataclass(frozen=True)
class Ears:
    """The encoder, whose inputs are rows: a `Source` without a vocabulary."""

    file: GGUFFile
    spec: ModelSpec

    @staticmethod
    def of(file: GGUFFile, whisper: Whisper) -> Ears:
        network, ears = replace(find_network(whisper.ears), vocab=0), ears_file(file)
        tensors = {name: info for name, info in ears.tensors.items() if not name.startswith("token_embd")}
        return Ears(replace(ears, tensors=tensors), replace(whisper.ears, vocab=0, network=network))


def words_of(model: Model, whisper: Whisper) -> Model:
    """The decoder, as the model of a bundle."""
    words = copy(model)
    words.file, words.spec = words_file(model.file), whisper.spec
    return words


def plan_ears(profile: DeviceProfile, whisper: Whisper, options: Options, process: int) -> Plan:
    """Plan a bundle that hears. process: its bytes besides the networks'. Raises BudgetError, which names the smallest
    budget that fits, InputError for options of texts."""
    check_options(replace(options, backend="cpu" if options.backend == AUTO else options.backend))
    stated, threads = (None, usable_cores()) if profile.name == HOST else limits_of(profile, options)
    threads = options.threads or threads
    engine, dtype = CPU(), options.kv_dtype or CPU.CAPABILITIES.kv_dtypes[0]
    words = EngineConfig(whisper.context, min(CHUNK, whisper.context), dtype, threads, crossed=whisper.positions)
    ears = EngineConfig(whisper.positions, whisper.positions, dtype, threads)
    one, other = engine.footprint(whisper.spec, words), engine.footprint(whisper.ears, ears)
    rows, positions, hidden = whisper.context // 2 + ALIGNED, whisper.positions, whisper.spec.hidden
    aligned = rows * (9 * positions + 4 * (hidden + whisper.spec.head_dim)) + 4 * positions * whisper.spec.head_dim
    sound = 4 * (whisper.frames * (HOP + whisper.mels) + 3 * whisper.vocab) + SOUND + aligned
    counted = PlanBytes(
        process, one.weights + other.weights, one.kv + other.kv, one.scratch + other.scratch + sound,
        fixed_kv=one.fixed_kv + other.fixed_kv,
    )  # fmt: skip
    limit = MemoryLimit(options.memory, "budget") if options.memory else stated or memory_limit()
    if (needed := counted.total + counted.reserve) > limit.bytes:
        raise BudgetError(
            f"needs {format_bytes(needed)}, the memory is {format_bytes(limit.bytes)}: state --memory "
            f"{-(-needed >> 20)}MiB, or take a smaller model", needed,
        )  # fmt: skip
    return Plan(CPU.NAME, "full", 0, words, 1, counted, counted.total, limit.bytes, limit.source)


def hearing_section(whisper: Whisper, tokenizer: TokenizerLike) -> bytes:
    """Section HEARING. Raises UnsupportedError for a model that the C runtime cannot hear with."""
    rules, most = TokenRules(whisper, tokenizer), whisper.context // 2
    longest = max(len(tokenizer.piece(token)) for token in range(whisper.eot))
    text_bytes = 3 * most * longest + _CHARACTER  # each byte may become U+FFFD
    sizes = ((whisper.mels, MOST_BANDS), (whisper.frames, MOST_FRAMES), (text_bytes, MOST_TEXT_BYTES))
    if any(size > most for size, most in sizes) or whisper.context < 2 * ALIGNED:
        raise UnsupportedError("a Whisper model of another size than openai's cannot be exported")
    codes = list(whisper.languages)
    values = {
        "mels": whisper.mels, "frames": whisper.frames, "text_bytes": text_bytes, "sot": whisper.sot,
        "eot": whisper.eot, "translate": whisper.translate, "transcribe": whisper.transcribe, "prev": whisper.prev,
        "no_speech": whisper.no_speech, "first_timestamp": whisper.first_timestamp, "never": rules.never.size,
        "blank": rules.blank.size, "languages": len(codes), "no_timestamps": whisper.no_timestamps,
    }  # fmt: skip
    lists = [rules.never, rules.blank, np.array([whisper.languages[code] for code in codes])]
    names = b"".join(code.encode() + b"\0" for code in codes)
    return filled(HEARING, values) + b"".join(each.astype("<i4").tobytes() for each in lists) + names


def stem_section(file: GGUFFile, whisper: Whisper) -> bytes:
    """Section STEM. Behind it are the heads whose attention across follows the sound (runtime/ears/align.c)."""
    names = [f"{name}.{of}" for name in STEM for of in ("weight", "bias")] + ["position_embd.weight"]
    tables = [read_weight(file, f"{EARS}{name}") for name in names]
    stem = stem_of(whisper.mels, whisper.spec.hidden, whisper.positions, tables, len(whisper.alignment))
    heads = (_queries(file, whisper, layer, head) for layer, head in whisper.alignment)
    return b"".join([stem, np.float32(whisper.spec.norm_eps).tobytes(), *heads])


def _queries(file: GGUFFile, whisper: Whisper, layer: int, head: int) -> bytes:
    """The head's place, and its matrix with its biases, into which the norm's weights and the scale are multiplied."""
    size = whisper.spec.head_dim
    own, part = slice(head * size, (head + 1) * size), f"blk.{layer}.cross_attn"
    matrix, bias = (read_weight(file, f"{part}_q.{kind}")[own] for kind in ("weight", "bias"))
    weight, shift = (read_weight(file, f"{part}_norm.{kind}") for kind in ("weight", "bias"))
    found = np.concatenate([(matrix * weight).reshape(-1), bias + matrix @ shift]) * np.float32(size**-0.5)
    return b"".join([np.array([layer, head], "<i4").tobytes(), found.astype("<f4").tobytes()])


def stem_of(mels: int, hidden: int, positions: int, tables: Sequence[FloatArray], heads: int = 0) -> bytes:
    """Section STEM, of the taps of both convolutions, [outputs, 3, inputs], each with its biases, and of positions."""
    first, bias, second, other, places = tables
    parts = [
        mel_filters(mels),
        _panels(first.reshape(hidden, -1)),
        bias,
        _panels(second.reshape(hidden, -1)),
        other,
        places,
    ]
    config = {"mels": mels, "hidden": hidden, "positions": positions, "heads": heads}
    return filled(STEM_CONFIG, config) + b"".join(each.astype("<f4").tobytes() for each in parts)


def _panels(matrix: FloatArray) -> FloatArray:
    """[columns, inner] as [columns / PANEL, inner, PANEL]. Raises UnsupportedError."""
    columns, inner = matrix.shape
    if columns % PANEL:
        raise UnsupportedError(f"a Whisper model whose width is no multiple of {PANEL} cannot be exported")
    return np.asarray(matrix.reshape(-1, PANEL, inner).swapaxes(1, 2))
