"""Compile context binaries for a device's NPU with its vendor's compiler, on this machine (backends/onnx/npu)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge.backends.onnx.graph.layout import Layout
from edge.backends.onnx.model_files import ModelFiles
from edge.backends.onnx.npu.contexts import compile_contexts
from edge.backends.onnx.npu.form import find_sizes, make_form
from edge.backends.onnx.providers import find_provider
from edge.budget import format_bytes
from edge.devices.profiles import find_profile, profile_names
from edge.devices.profiles.profile import DeviceProfile, Npu
from edge.errors import InputError, UnsupportedError
from edge.formats.compiled import Compiled, StaticForm
from edge.formats.gguf import GGUFFile
from edge.formats.onnx_folder import WEIGHTS
from edge.model.structure.spec import ModelSpec
from edge.options import Options
from edge.plan.checks import check_static_sizes, fixed_sizes
from edge.plan.npu import npu_use
from edge.types import Progress


@dataclass(frozen=True)
class NpuTarget:
    """An NPU to compile for; None: the default size."""

    device: str  # name of a profile
    rows: int | None = None  # of the KV cache
    chunk: int | None = None  # tokens of a prefill pass


def check_target(target: NpuTarget) -> tuple[DeviceProfile, Npu]:
    """Find the device and its NPU.

    Raises InputError for devices without an NPU that can be compiled for here, MissingExtraError without its compiler.
    """
    profile = find_profile(target.device)
    npu = profile.npu
    if npu is None or npu.provider is None:
        found = f"whose NPU ({npu}) edge knows no compiler for" if npu else "which has no NPU that edge knows of"
        raise InputError(f"--device {profile.name}, {found}: choose {', '.join(_devices())}")
    if npu.provider == "qnn" and not (npu.soc and npu.arch):
        raise InputError(f"the profile of {profile.name} does not say which chip it has: state soc and arch in [npu]")
    find_provider(npu.provider)
    return profile, npu


def plan_form(file: GGUFFile, spec: ModelSpec, target: NpuTarget) -> StaticForm:
    """The static form that would be compiled.

    Raises the errors of `check_target`, InputError for impossible sizes, UnsupportedError for models that the NPU
    cannot run.
    """
    profile, npu = check_target(target)
    if (use := npu_use(file, spec, profile)).reasons:
        raise UnsupportedError(f"not for the NPU of {profile.name}: {use.reasons[0]}")
    check_static_sizes(spec, target.rows, target.chunk)
    sizes = find_sizes(spec, npu.provider, elsewhere=True)
    assert sizes is not None
    stated = Options(max_kv_size=target.rows, prefill_step_size=target.chunk)
    rows, chunk, kv_dtype = fixed_sizes(stated, sizes)
    return make_form(spec, rows or sizes.rows, chunk, kv_dtype, shards=use.shards)


def compile_npu(
    file: GGUFFile, spec: ModelSpec, layout: Layout, folder: Path, target: NpuTarget, progress: Progress | None = None
) -> Compiled:
    """Compile the model whose weights lie in `folder` into context binaries beside them.

    Raises the errors of `plan_form`; EngineError if the compiler refuses the model, UnsupportedError if its output
    exceeds the NPU's address space.
    """
    profile, npu = check_target(target)
    assert npu.provider is not None
    form, files = plan_form(file, spec, target), ModelFiles(layout, folder, WEIGHTS, "")
    provider = find_provider(npu.provider).compiling_for(npu)
    made = compile_contexts(spec, files, form, provider, progress)
    most = profile.value("npu_context")
    if most is not None and max(made.sizes) > most:
        raise UnsupportedError(
            f"a context of {format_bytes(max(made.sizes))} is more than the {format_bytes(most)} that the NPU of "
            f"{profile.name} addresses: lower --max-kv-size {form.rows} or --prefill-step-size {form.chunk}"
        )
    return Compiled(
        form, npu.provider, profile.name, npu.soc, npu.arch, made.compiler, made.files, made.graphs, made.source
    )  # fmt: skip


def _devices() -> list[str]:
    """Profiles with an NPU that can be compiled for."""
    profiles = (find_profile(name) for name in profile_names())
    return [each.name for each in profiles if each.npu and each.npu.provider]
