"""Compile each static form for an absent NPU; report size and compile time.

A compiler that runs here tells a context's size and its own time, but nothing tells the NPU's speed: QNN's emulator
computes on this processor, and the cycles that it counts are this processor's.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edge.backends.onnx.model_files import ModelFiles, find_model_files
from edge.backends.onnx.providers import Provider
from edge.backends.onnx.tuning import form_of, make_space
from edge.backends.tuning import Field, Values, defaults
from edge.converters.npu import NpuTarget, check_target, plan_form
from edge.converters.npu_child import Request, compile_in_child
from edge.devices.output import work_folder
from edge.devices.profiles import find_profile, profile_names
from edge.errors import EngineError
from edge.formats.compiled import StaticForm
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec
from edge.plan.npu import weights_bytes
from edge.tuning.static import check_not_compiled

WHY_NO_RECORD = "no NPU is here to time the forms on, and the emulator's cycles are those of this processor"


@dataclass(frozen=True)
class Tried:
    """A form that was compiled."""

    form: StaticForm
    seconds: float  # to compile, measured
    contexts: tuple[int, ...] = ()  # bytes of each file, measured
    weights: int = 0  # bytes of weights in them, counted
    fits: bool | None = None  # every context is within the NPU's limit; None: unknown limit
    error: str | None = None  # why the compiler refused it, without contexts; None: it did not

    @property
    def nbytes(self) -> int:
        return sum(self.contexts)

    @property
    def beyond(self) -> int:
        """Bytes of the contexts that are not weights."""
        return self.nbytes - self.weights


@dataclass(frozen=True)
class Forms:
    """The forms of a model, compiled for an NPU."""

    device: str
    npu: str
    compiler: str
    limit: float | None  # bytes of a context; None: unknown
    tried: tuple[Tried, ...]  # smallest first, refused ones last
    candidates: int  # size of the search space
    late: bool = False  # --time was over before the last of them
    interrupted: bool = False


def try_forms(
    file: GGUFFile, spec: ModelSpec, target: NpuTarget, *, kv_dtype: str = "f16", trials: int, seconds: float,
    on_trial: Callable[[int, int, Values], None] = lambda done, of, values: None,
) -> Forms:  # fmt: skip
    """Compile forms for a device's NPU: the default, then those that differ from it in one field, in two …

    trials: most forms. seconds: for everything; a compiler that takes longer is ended, as by Ctrl-C, which keeps the
    results. on_trial: called before each form with the number done, the number of all, and its values.
    Raises the errors of `plan_form`, and InputError for an already compiled model.
    """
    deadline = time.monotonic() + seconds
    check_not_compiled(file, spec)
    profile, npu = check_target(target)
    usual = plan_form(file, spec, target, kv_dtype, tuned=False)
    candidates = list(itertools.islice(_candidates(make_space(spec, usual)), trials))
    tried, compilers, late, interrupted, longest = list[Tried](), set[str](), False, False, 0.0
    with work_folder() as folder:
        try:
            files = find_model_files(file, spec)
            _give(files, folder)
            for done, values in enumerate(candidates):
                left = deadline - time.monotonic()
                if late := left <= longest:
                    break
                on_trial(done, len(candidates), values)
                form, started = form_of(spec, usual, values), time.monotonic()
                request = Request(str(file.folder or file.path), str(folder), files.data, form, profile.name)
                try:
                    made = compile_in_child(request, left)
                except EngineError as error:
                    if late := time.monotonic() >= deadline:
                        break
                    tried.append(Tried(form, time.monotonic() - started, error=str(error)))
                else:
                    fits = None if (most := profile.value("npu_context")) is None else max(made.sizes) <= most
                    weights = weights_bytes(files.layout, spec, form.head)
                    tried.append(Tried(form, made.seconds, made.sizes, weights, fits))
                    compilers.add(made.compiler)
                longest = max(longest, time.monotonic() - started)
                _clear(folder, files.data)
        except KeyboardInterrupt:
            interrupted = True
    return Forms(
        profile.name, str(npu), ", ".join(compilers), profile.value("npu_context"),
        tuple(sorted(tried, key=lambda each: (each.error is not None, each.nbytes))), len(candidates), late,
        interrupted,
    )  # fmt: skip


def emulated_device(provider: Provider) -> str:
    """The profile of a device with the chip that a provider emulates."""
    chip = provider.compiling_for(None).options
    npus = {name: find_profile(name).npu for name in profile_names()}
    return next(
        name
        for name, npu in npus.items()
        if npu and npu.provider == provider.name and (str(npu.soc), npu.arch) == (chip["soc_model"], chip["htp_arch"])
    )


def _candidates(space: tuple[Field, ...]) -> Iterator[Values]:
    """The defaults, then the others by the number of fields that differ."""
    usual = defaults(space)
    for count in range(len(space) + 1):
        for fields in itertools.combinations(space, count):
            others = [[each for each in field.choices if each != field.default] for field in fields]
            for chosen in itertools.product(*others):
                yield usual | dict(zip((field.name for field in fields), chosen, strict=True))


def _give(files: ModelFiles, folder: Path) -> None:
    """Put the weights into the folder of contexts, without a copy on the same file system."""
    try:
        os.link(files.folder / files.data, folder / files.data)
    except OSError:
        shutil.copyfile(files.folder / files.data, folder / files.data)


def _clear(folder: Path, data: str) -> None:
    for path in folder.iterdir():
        if path.name != data:
            path.unlink()
