"""The search space of `edge tune` for static graphs, on an NPU here or on the processor: their form."""

from __future__ import annotations

from edge.backends.onnx.npu.form import find_sizes, make_form
from edge.backends.onnx.tuning import LEAST_ROWS, npu_setting
from edge.backends.tuning import Setting
from edge.errors import InputError
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec
from edge.options import Options
from edge.plan.checks import check_count, with_fixed_sizes


def static_setting(
    file: GGUFFile, spec: ModelSpec, provider: str, *, rows: int | None = None, kv_dtype: str | None = None
) -> Setting:
    """The setting to tune. provider: a static one that computes here. rows: of the KV cache.

    Raises InputError for an already compiled model and for sizes that cannot be timed, UnsupportedError for a KV dtype
    that static graphs lack.
    """
    check_not_compiled(file, spec)
    sizes = find_sizes(spec, provider, elsewhere=True)  # without what was found before
    assert sizes is not None
    check_count("--max-kv-size", rows, LEAST_ROWS, spec.context, f" ({spec.context} positions is all it knows)")
    options = with_fixed_sizes(Options(max_kv_size=rows, kv_dtype=kv_dtype), sizes)
    rows = options.max_kv_size or sizes.rows
    chunk = options.prefill_step_size or sizes.chunk
    return npu_setting(file, spec, provider, make_form(spec, rows, chunk, options.kv_dtype or sizes.kv_dtypes[0]))


def check_not_compiled(file: GGUFFile, spec: ModelSpec) -> None:
    """Raise InputError for a folder with context binaries."""
    if spec.compiled:
        raise InputError(f"{file.folder} is compiled already, and so are its sizes: tune the model that it was made of")
