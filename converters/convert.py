"""The pipeline of `edge convert`, with GGUF as the pivot format.

A Hugging Face folder first becomes a GGUF file in its own types; pruning and quantizing turn a GGUF file into another;
finally the model is written in the requested format. Each step works tensor by tensor, in a folder beside the target;
the target appears only when everything has been written, read back and checked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edge.converters.calibrate import OWN_TEXT, TOKENS, calibration_tokens, collect
from edge.converters.coreml import writer as coreml
from edge.converters.coreml.sizes import USUAL, Sizes
from edge.converters.evaluate import Evaluated, evaluate
from edge.converters.gguf.factors import write_folded
from edge.converters.gguf.merge import merge_gguf, plan_merge
from edge.converters.gguf.plain import fields_as
from edge.converters.gguf.quantize import CALIBRATED, Settings, mix_types, plan_types, quantize_gguf, quantizing_notes
from edge.converters.gguf.quantize import Report as Quantized
from edge.converters.hearing import plan_hearing, write_hearing
from edge.converters.huggingface import writer as hf
from edge.converters.huggingface.adapter import is_adapter_folder
from edge.converters.huggingface.config import read_config
from edge.converters.huggingface.ears import is_alone
from edge.converters.huggingface.mmproj import mmproj_path, plan_mmproj, plan_rounded, round_mmproj, sees, write_mmproj
from edge.converters.huggingface.reader import convert_folder, is_folder, outline_folder
from edge.converters.onnx import writer as onnx
from edge.converters.onnx.methods import NEED_STATISTICS, find_method, planning_method
from edge.converters.onnx.npu import NpuTarget, check_target, plan_form
from edge.converters.onnx.writer import planned_files, rounded_types, write_onnx
from edge.converters.pruning import repair
from edge.converters.pruning.prune import Pruned, Pruning, check_pruning, perplexity_on, plan_pruning, prune_gguf
from edge.converters.quantizers.mixed import AROUND, Mixture, types_of_gguf
from edge.devices.memory import memory_use
from edge.devices.output import check_folder, work_folder
from edge.errors import InputError, MissingExtraError, UnsupportedError
from edge.formats.blocks import GRIDS
from edge.formats.compiled import Compiled
from edge.formats.gguf import GGUFFile, factors_of, read_gguf
from edge.formats.gguf_parts import find_parts, join, joined_header
from edge.formats.gguf_writer import Planned, check_gguf, copy_gguf, fields_of, planned_as, write_outline
from edge.formats.onnx_folder import WEIGHTS, is_model_folder, read_folder, read_manifest
from edge.model.adapters.lora import open_lora
from edge.model.adapters.lora_file import LoraFile
from edge.model.drafters.assistant import is_assistant, read_assistant
from edge.model.model import make_tokenizer
from edge.model.names.catalog import find_model, is_coreml_folder
from edge.model.reader import read_spec
from edge.model.tokens.tokenizer import TokenizerLike
from edge.model.towers import is_mmproj
from edge.model.whisper.checkpoint import hears
from edge.types import IntArray, Progress

FORMATS = ("gguf", "onnx", "coreml", "hf")
# Types that blocks of ONNX Runtime and Core ML hold without rounding again.
_IN_BLOCKS = tuple(kind for kind, grid in GRIDS.items() if grid.uniform and grid.bits in (4, 8))
_HELD = 8  # the last eighth of the calibration text is held out, to measure the effect of pruning

_OURS = {"onnx": is_model_folder, "coreml": is_coreml_folder, "hf": hf.is_ours}

Steps = Callable[[str], Progress]
"""Takes the name of a step, and returns a function that takes the fraction that is done."""

Tokens = Callable[[TokenizerLike], IntArray]
"""Makes the calibration text's tokens, int32 [n], with the model's own tokenizer."""


@dataclass(frozen=True)
class Conversion:
    """A request to `convert`."""

    to: str  # one of FORMATS
    pruning: Pruning | None = None
    repair: int = 0  # steps of distillation after pruning
    settings: Settings | None = None  # of quantization; None: types stay
    size: int | None = None  # limit of the GGUF file in bytes, for mixing types
    kl: float | None = None  # limit of the loss in nats, for mixing types
    mixed_outside: tuple[str, ...] = AROUND  # tensors outside of layers whose types are mixed, too, in GGUF files
    onnx_method: str | None = None  # a method that only ONNX has
    lora: tuple[LoraFile, ...] = ()  # adapters to merge first
    npu: NpuTarget | None = None  # also compile the ONNX folder for a device's NPU
    sizes: Sizes = USUAL  # of the Core ML program
    evaluates: bool = False  # compare the quantized model with its source

    @property
    def quantizes(self) -> bool:
        return self.settings is not None or self.onnx_method is not None

    @property
    def keeps_blocks(self) -> bool:
        """Whether matrices that are quantized in the checkpoint keep their blocks."""
        return self.settings is None and self.pruning is None and not self.lora and self.to != "hf"

    @property
    def mixes(self) -> bool:
        return self.size is not None or self.kl is not None

    @property
    def calibrated(self) -> bool:
        """Whether a calibration text is used."""
        by_method = self.settings is not None and self.settings.method in CALIBRATED
        return self.pruning is not None or by_method or self.mixes or self.onnx_method in NEED_STATISTICS


@dataclass
class Report:
    """The result of `convert`."""

    target: Path
    files: dict[str, int] = field(default_factory=dict)  # bytes by name
    seconds: dict[str, float] = field(default_factory=dict)  # by step
    peak: int = 0  # of the resident set, bytes (measured)
    read: list[str] = field(default_factory=list)  # lines on quantized matrices of a checkpoint
    pruned: Pruned | None = None
    perplexity: dict[str, float] = field(
        default_factory=dict
    )  # around pruning, on held-out calibration text (measured)
    mixture: Mixture | None = None
    quantized: Quantized | None = None
    bits_per_weight: float = 0.0  # of the quantized tensors
    evaluated: Evaluated | None = None  # the loss of quantizing
    unevaluated: str = ""  # why the loss is unknown
    rounded: list[str] = field(default_factory=list)  # block types rounded to 8 bits, since the format lacks their grid
    compiled: Compiled | None = None  # the context binaries


def find_format(to: str | None, target: Path) -> str:
    """The format: `--to`, or by the target's name. Raises InputError."""
    chosen = to or ("gguf" if target.suffix == ".gguf" else "onnx")
    if chosen not in FORMATS:
        raise InputError(f"--to {to!r}: choose {', '.join(FORMATS)}")
    return chosen


def find_source(source: str | Path) -> Path:
    """Resolve a source to a Hugging Face folder or a GGUF file. Raises the errors of find_model, InputError for ONNX
    folders."""
    path = Path(source)
    if hears(path):
        return path
    if path.is_dir() and not is_model_folder(path) and not is_coreml_folder(path):
        if is_folder(path):
            return path
        if is_adapter_folder(path):
            raise InputError(f"{path} is a PEFT adapter: state its model in GGUF with --base MODEL")
        raise InputError(f"{path} has no config.json: edge convert reads Hugging Face folders and GGUF files")
    found = find_model(source)
    if is_model_folder(found):
        raise InputError(f"{found} is a model in ONNX already: convert what it was made of")
    return found


@np.errstate(all="ignore")  # damaged or huge weights: writers refuse values that are not finite, in one line
def convert(
    source: str | Path,
    target: Path,
    wanted: Conversion,
    *,
    tokens: Tokens | None = None,
    force: bool = False,
    steps: Steps = lambda name: lambda done: None,
) -> Report:
    """Write `target`, atomically.

    source: a GGUF file, a Hugging Face folder, or an installed model. tokens: the calibration text, for the methods
    that need one; by default OWN_TEXT, but not for pruning. Raises InputError, ModelFormatError, UnsupportedError,
    MissingExtraError.
    """
    path = find_source(source)
    _check(path, target, wanted, tokens, force)
    report = Report(target)
    if hears(path):
        with _timed(report, "writing", steps) as progress:
            planned = write_hearing(path, target, _plain_type(path, wanted, "hears"), progress)
        report.bits_per_weight = 8 * sum(each.nbytes for each in planned) / sum(each.values for each in planned)
        report.files, report.peak = {target.name: target.stat().st_size}, memory_use().peak
        return report
    if is_folder(path) and is_alone(read_config(path)):
        with _timed(report, "writing", steps) as progress:
            write_mmproj(path, target, _plain_type(path, wanted, "hears") or "F16", progress)
        report.files, report.peak = {target.name: target.stat().st_size}, memory_use().peak
        return report
    with work_folder(target) as work:
        file = _read(path, work, wanted, report, steps)
        if is_assistant(file):
            _write_assistant(file, wanted, report)
            return report
        if is_mmproj(file):
            with _timed(report, "writing", steps) as progress:
                round_mmproj(file, target, _plain_type(path, wanted, "is an encoder") or "F16", progress)
            report.files, report.peak = {target.name: target.stat().st_size}, memory_use().peak
            return report
        eyes = mmproj_path(target) if _has_eyes(path, wanted) else None
        if eyes:  # first: an encoder that is refused must leave no text model behind, nor replace another encoder
            with _timed(report, "writing eyes", steps) as progress:
                write_mmproj(path, work / eyes.name, _type_of_eyes(wanted), progress)
        if wanted.pruning:
            check_pruning(read_spec(file), wanted.pruning)  # before minutes of work
        if lora := open_lora(wanted.lora, file, read_spec(file), merging=True):
            with _timed(report, "merging", steps) as progress:
                merge_gguf(file, work / "merged.gguf", lora, progress)
            file = read_gguf(work / "merged.gguf")
        ids = (tokens or own_tokens)(make_tokenizer(file)) if wanted.calibrated else None
        if wanted.pruning and ids is not None:
            file = _prune(file, work, wanted, ids, report, steps)
        if wanted.settings:
            settings, made = _mixed(file, wanted.settings, wanted, ids, report, steps), work / "quantized.gguf"
            with _timed(report, "quantizing", steps) as progress:
                report.quantized = quantize_gguf(file, read_spec(file), made, settings, ids, progress)
            before, file = file, read_gguf(made)
            if wanted.evaluates:
                _evaluate(before, file, report, steps)
        parameters = read_spec(file).parameters
        _write(file, work, wanted, ids, force, report, steps)
        if eyes:
            (work / eyes.name).replace(eyes)
        if wanted.onnx_method and wanted.evaluates:
            _evaluate(file, read_folder(target), report, steps)
    report.files = {target.name: target.stat().st_size} if target.is_file() else coreml.file_sizes(target)
    if eyes:
        report.files[eyes.name] = eyes.stat().st_size
    if report.quantized:
        report.bits_per_weight = report.quantized.bits_per_weight
    elif wanted.onnx_method:
        report.bits_per_weight = 8 * report.files[WEIGHTS] / parameters
    report.peak = memory_use().peak
    return report


def own_tokens(tokenizer: TokenizerLike) -> IntArray:
    """OWN_TEXT's tokens, int32 [n]."""
    return calibration_tokens(tokenizer, [OWN_TEXT], TOKENS)


def preview(
    source: str | Path, target: Path, wanted: Conversion
) -> tuple[dict[str, int | None], list[Planned], tuple[str, ...]]:
    """Preview `convert`: bytes of each file (None: unknown until written), the tensors, and notes on their types.

    No weights are read. Raises as `convert`.
    """
    path = find_source(source)
    if hears(path):
        planned = plan_hearing(path, _plain_type(path, wanted, "hears"))
        return {target.name: None}, planned, ()
    notes: tuple[str, ...] = ()
    if is_folder(path) and is_alone(read_config(path)):
        return {target.name: None}, plan_mmproj(path, _plain_type(path, wanted, "hears") or "F16"), ()
    with work_folder() as work:
        outline = work / f"{path.stem}.gguf"
        if path.is_dir():
            file = outline_folder(path, outline, blocks=wanted.keeps_blocks)
        elif parts := find_parts(path):
            whole = joined_header([read_gguf(part, part=True) for part in parts])
            file = write_outline(outline, fields_of(whole), planned_as(whole.tensors.values()))
        else:
            file = read_gguf(path)
        if is_assistant(file):
            _check_assistant(file, wanted)
            return {target.name: file.size}, planned_as(file.tensors.values()), ()
        if is_mmproj(file):
            return {target.name: None}, plan_rounded(file, _plain_type(path, wanted, "is an encoder") or "F16"), ()
        if lora := open_lora(wanted.lora, file, read_spec(file), merging=True):
            file = write_outline(outline, fields_of(file), plan_merge(file, lora))
        if wanted.pruning:
            file = write_outline(outline, *plan_pruning(file, read_spec(file), wanted.pruning))
        if wanted.settings:
            types = plan_types(file, read_spec(file), wanted.settings)
            planned = [Planned(name, info.shape, types[name]) for name, info in file.tensors.items()]
            notes = quantizing_notes(file, read_spec(file), wanted.settings, planned)
            file = write_outline(outline, fields_as(file, wanted.settings.type), planned)
        planned = planned_as(file.tensors.values())
        if wanted.to == "onnx":
            method = planning_method(wanted.onnx_method, file, read_spec(file))
            contexts = {}
            if wanted.npu:
                form = plan_form(file, read_spec(file), wanted.npu)
                contexts = {f"npu.{shard}.bin": None for shard in range(form.shards)}
            return planned_files(file, read_spec(file), method) | contexts, planned, notes
        if wanted.to == "coreml":
            wanted.sizes.fitted(read_spec(file))
            return coreml.planned_files(file, read_spec(file)), planned, notes
        files: dict[str, int | None] = {target.name: file.size if wanted.to == "gguf" else None}
        if _has_eyes(path, wanted):
            files[mmproj_path(target).name] = None
        return files, planned, notes


def _has_eyes(path: Path, wanted: Conversion) -> bool:
    """Whether an encoder of pictures is written beside the model."""
    return wanted.to == "gguf" and is_folder(path) and sees(path)


def _type_of_eyes(wanted: Conversion) -> str:
    """Of the encoder's matrices: they lose much below 8 bits, and are few."""
    return "Q8_0" if wanted.settings else "F16"


def _check(path: Path, target: Path, wanted: Conversion, tokens: Tokens | None, force: bool) -> None:
    """Check everything that needs no file content."""
    if target.exists() and target.samefile(path):
        raise InputError(f"{target} is the model to convert: choose another name")
    if wanted.to == "gguf":
        check_gguf(target, force=force)
        if _has_eyes(path, wanted) and not is_alone(read_config(path)):
            check_gguf(mmproj_path(target), force=force)
    else:
        check_folder(target, _OURS[wanted.to], force=force)
    if wanted.to == "coreml":
        coreml.check_target(target)
    if wanted.repair:
        repair.check_installed()
    if wanted.onnx_method and wanted.to != "onnx":
        raise InputError(f"--method {wanted.onnx_method} is a way to store weights in ONNX: use --to onnx")
    if wanted.npu:
        if wanted.to != "onnx":
            raise InputError(f"--npu compiles a folder in ONNX, not {wanted.to}: use --to onnx")
        check_target(wanted.npu)
    if wanted.to == "onnx":
        onnx.check_installed()
    if tokens is None and wanted.pruning:
        raise InputError("pruning goes by what a text makes of the model: state one with --calibration FILE")


def _read(path: Path, work: Path, wanted: Conversion, report: Report, steps: Steps) -> GGUFFile:
    if not path.is_dir() and (parts := find_parts(path)):
        with _timed(report, "joining", steps) as progress:
            join(parts, work / "joined.gguf", progress)
        file = read_gguf(work / "joined.gguf")
    elif path.is_dir():
        with _timed(report, "reading", steps) as progress:
            report.read = convert_folder(path, work / "read.gguf", progress=progress, blocks=wanted.keeps_blocks)
        file = read_gguf(work / "read.gguf")
    else:
        file = read_gguf(path)
    if factors_of(file.tensors) and not wanted.keeps_blocks:
        write_folded(file, work / "folded.gguf")
        file = read_gguf(work / "folded.gguf")
    return file


def _check_assistant(file: GGUFFile, wanted: Conversion) -> None:
    """Check an assistant's header, and that nothing is wanted but GGUF."""
    if wanted.to != "gguf" or wanted.pruning or wanted.quantizes or wanted.lora:
        raise UnsupportedError(f"{file.path.name}: a drafter becomes GGUF in its own types: leave all options out")
    read_assistant(file)


def _write_assistant(file: GGUFFile, wanted: Conversion, report: Report) -> None:
    _check_assistant(file, wanted)
    copy_gguf(file, report.target, file.tensors.values())
    report.files = {report.target.name: report.target.stat().st_size}
    report.peak = memory_use().peak


def _plain_type(path: Path, wanted: Conversion, does: str) -> str | None:
    """The block type for a model that hears or sees. Raises UnsupportedError for what does not apply to it."""
    refused = {
        f"--to {wanted.to}": wanted.to != "gguf", "pruning": wanted.pruning is not None, "--lora": bool(wanted.lora),
        "--target-size or --target-kl": wanted.mixes, "--method": wanted.onnx_method is not None,
        "--calibration": wanted.calibrated,
    }  # fmt: skip
    for what, given in refused.items():
        if given:
            raise UnsupportedError(f"{path.name} {does}: it becomes GGUF, rounded to a --type; leave out {what}")
    return None if wanted.settings is None else wanted.settings.type


def _prune(file: GGUFFile, work: Path, wanted: Conversion, ids: IntArray, report: Report, steps: Steps) -> GGUFFile:
    """Prune, repair if requested, and record the perplexity on the end of the text."""
    assert wanted.pruning
    seen, held = np.split(ids, [ids.size - ids.size // _HELD])
    report.perplexity["before"] = perplexity_on(file, read_spec(file), held)
    with _timed(report, "pruning", steps) as progress:
        report.pruned = prune_gguf(file, read_spec(file), work / "pruned.gguf", wanted.pruning, seen, progress)
    pruned = read_gguf(work / "pruned.gguf")
    report.perplexity["pruned"] = perplexity_on(pruned, read_spec(pruned), held)
    if not wanted.repair:
        return pruned
    with _timed(report, "repairing", steps) as progress:
        repair.repair(file, pruned, work / "repaired.gguf", seen, wanted.repair, progress)
    repaired = read_gguf(work / "repaired.gguf")
    report.perplexity["repaired"] = perplexity_on(repaired, read_spec(repaired), held)
    return repaired


def _mixed(
    file: GGUFFile, settings: Settings, wanted: Conversion, ids: IntArray | None, report: Report, steps: Steps
) -> Settings:
    """The settings, with a type for each matrix if a size or a quality was given."""
    if not wanted.mixes or ids is None:
        return settings
    with _timed(report, "measuring", steps) as progress:
        settings, report.mixture = mix_types(
            file, read_spec(file), settings, ids, nbytes=wanted.size, kl=wanted.kl, progress=progress,
            kinds=_IN_BLOCKS if wanted.to in ("onnx", "coreml") else types_of_gguf(),
            outside=wanted.mixed_outside if wanted.to == "gguf" else (),
        )  # fmt: skip
    return settings


def _evaluate(source: GGUFFile, made: GGUFFile, report: Report, steps: Steps) -> None:
    if read_spec(source).encoder:
        report.unevaluated = "it is measured by what a model generates, and encoders generate nothing"
        return
    with _timed(report, "evaluating", steps) as progress:
        try:
            report.evaluated = evaluate(source, made, progress)
        except (UnsupportedError, InputError, MissingExtraError) as error:
            report.unevaluated = str(error)


def _write(
    file: GGUFFile, work: Path, wanted: Conversion, ids: IntArray | None, force: bool, report: Report, steps: Steps
) -> None:
    spec, target = read_spec(file), report.target
    statistics = None
    if wanted.onnx_method in NEED_STATISTICS and ids is not None:
        with _timed(report, "calibrating", steps) as progress:
            statistics = collect(file, spec, ids, progress)
    with _timed(report, "writing", steps) as progress:
        if wanted.to == "onnx":
            method = find_method(wanted.onnx_method, file, spec, statistics)
            write_onnx(file, spec, target, method=method, npu=wanted.npu, force=force, progress=progress)
            report.rounded = [] if wanted.onnx_method else rounded_types(file, spec)
            report.compiled = read_manifest(target).npu
        elif wanted.to == "coreml":
            coreml.write_coreml(file, spec, target, wanted.sizes.fitted(spec), force=force, progress=progress)
            report.rounded = rounded_types(file, spec)
        elif wanted.to == "hf":
            hf.write_folder(file, spec, target, force=force, progress=progress)
        elif file.path.parent == work:
            os.replace(file.path, target)  # it was written, synced and read again by its step
        else:
            copy_gguf(file, target, file.tensors.values(), progress)


@contextmanager
def _timed(report: Report, step: str, steps: Steps) -> Iterator[Progress]:
    start = time.monotonic()
    yield steps(step)
    report.seconds[step] = time.monotonic() - start
