"""Whether a device's NPU can run a model, decided from the header of the model's file before anything is compiled.

Compilers of NPUs require fixed sizes, blocks of 4 or 8 bits or floats, and contexts no larger than the NPU can address:
larger models are split into shards of some layers each.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edge.budget import format_bytes
from edge.devices.profiles import HOST
from edge.devices.profiles.profile import DeviceProfile, Npu
from edge.errors import EdgeError, InputError, ModelFormatError, UnsupportedError, worded
from edge.formats.blocks import BLOCK
from edge.formats.compiled import Compiled
from edge.formats.gguf import GGUFFile
from edge.model.structure.spec import ModelSpec
from edge.records import dataclass

if TYPE_CHECKING:
    from edge.backends.onnx.graph.layout import Layout, Matrix

_HEADS = ("output", "token_embd")
_TABLE = "per_layer_token_embd"  # of which the host looks rows up

_MORE_FOR_MINIMA = 2  # bytes per block in a context, besides its zero point; measured with QNN 2.51


@dataclass(frozen=True)
class NpuUse:
    """The use of a device's NPU by a model. device: the profile's name. npu: None if the device has none. context:
    bytes of the compiled weights and of their graphs, for a chunk and for a step; 0: unknown. shards: the number of
    contexts that they are split into. compiled: whether the model's folder has the contexts; otherwise their size is
    estimated. reasons: why the NPU does not run the model; empty: it does."""

    device: str
    npu: Npu | None
    context: int = 0
    shards: int = 1
    compiled: bool = False
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "no: " + "; ".join(self.reasons) if self.reasons else f"yes: {self.contexts}"

    @property
    def contexts(self) -> str:
        """In words."""
        parts = "1 context" if self.shards == 1 else f"{self.shards} contexts"
        size = format_bytes(self.context) + (" (compiled)" if self.compiled else " (estimated)")
        return f"{parts}, {size}"


def npu_use(file: GGUFFile, spec: ModelSpec, profile: DeviceProfile) -> NpuUse:
    """The NPU's use by a model that is not loaded. Raises ModelFormatError for a folder that lacks its contexts."""
    from edge.backends.onnx.folders import check_folder  # here: most plans are for other processors
    from edge.backends.onnx.graph.layout import check_static, make_layout
    from edge.backends.onnx.npu.form import graph_bytes

    if profile.npu is None:
        return NpuUse(profile.name, None, reasons=(_no_npu(profile),))
    whose = [why] if (why := no_provider(profile.npu)) else []
    if spec.compiled and file.folder and not whose:
        return _compiled(file.folder, spec.compiled, profile.name, profile.npu)
    try:
        check_static(spec)
        layout = make_layout(file, spec) if file.folder is None else check_folder(file, spec)
    except EdgeError as error:
        why = str(error).removeprefix(f"{file.folder or file.path}: ")
        for engine in ("cpu", "llamacpp"):
            why = why.removesuffix(worded(f": use --backend={engine}"))
        return NpuUse(profile.name, profile.npu, reasons=(*whose, f"it has no graph for an ONNX engine ({why})"))
    layers, head = _layers(layout), layout.matrices[_HEADS[spec.tied_head]]
    graphs = graph_bytes(spec) + sum(map(_for_minima, layers))
    reasons, context = [*whose, *_wide(layers)], _weights_bytes(layout, spec) + graphs
    shards, limit = 1, profile.value("npu_context")
    if limit is not None and context > limit:
        # Shards have as equal numbers of layers as possible; the last one also has the head.
        least = max((sum(map(_nbytes, layers)) + graphs) / spec.layers, _nbytes(head))
        shards = next((n for n in range(2, spec.layers + 1) if context / n + least <= limit), 0)
        if not shards:
            reasons.append(f"one of its parts is larger than a context of {format_bytes(limit)}")
    return NpuUse(profile.name, profile.npu, context, shards or 1, reasons=tuple(reasons))


def no_provider(npu: Npu) -> str:
    """Why ONNX Runtime cannot run on this NPU, and the alternative if there is one; empty if it can."""
    if npu.provider is not None:
        return ""
    if npu.vendor == "Apple":
        return "ONNX Runtime does not run on it: edge convert --to coreml writes packages for Core ML"
    return f"edge knows no compiler for NPUs of {npu.vendor}"


def _weights_bytes(layout: Layout, spec: ModelSpec) -> int:
    """Bytes of the weights in compiled contexts: packed, with scales; floats become float16."""
    matrices = [*_layers(layout), layout.matrices[_HEADS[spec.tied_head]]]
    return sum(map(_nbytes, matrices)) + _vectors(layout)


def check_npu(file: GGUFFile, spec: ModelSpec, profile: DeviceProfile, provider: str) -> NpuUse:
    """Raise InputError if the provider does not run on the device's NPU, UnsupportedError if the NPU cannot run the
    model."""
    if profile.npu_named(provider) is None:
        found = f"its NPU is {profile.npu}" if profile.npu else _no_npu(profile)
        other = f": use --provider={profile.npu.provider}" if profile.npu and profile.npu.provider else ""
        raise InputError(f"--provider={provider} does not run on {profile.name}, {found}{other}")
    use = npu_use(file, spec, profile)
    if use.reasons:
        raise UnsupportedError(f"not for the NPU of {profile.name}: {use.reasons[0]}")
    return use


def _compiled(folder: Path, found: Compiled, device: str, npu: Npu) -> NpuUse:
    try:
        size = sum((folder / name).stat().st_size for name in found.contexts)
    except OSError as error:
        raise ModelFormatError(
            f"{folder}: a context cannot be read ({error.strerror}): convert the model again"
        ) from None
    own, its = (npu.provider, npu.soc, npu.arch), (found.provider, found.soc, found.arch)
    reasons = []
    if any(a != b for a, b in zip(own, its, strict=True) if a and b):
        chip = f"{found.device} ({found.provider} v{found.arch})" if found.arch else found.device
        reasons.append(f"it was compiled for {chip}: convert it again with --npu --device {device}")
    return NpuUse(device, npu, size, found.form.shards, True, tuple(reasons))


def _no_npu(profile: DeviceProfile) -> str:
    return "the system shows no NPU" if profile.name == HOST else "its profile names no NPU"


def _layers(layout: Layout) -> list[Matrix]:
    return [matrix for name, matrix in layout.matrices.items() if name not in (*_HEADS, _TABLE)]


def _fits(matrix: Matrix) -> bool:
    from edge.backends.onnx.graph.forms import Blocks, Floats

    return isinstance(matrix.form, Floats | Blocks)


def _wide(matrices: list[Matrix]) -> list[str]:
    """A reason if some matrices have a form that NPUs cannot multiply; else empty."""
    wide = [matrix for matrix in matrices if not _fits(matrix)]
    if not wide:
        return []
    return [
        f"{len(wide)} of its {len(matrices)} matrices are neither floats nor blocks of 4 or 8 bits: convert it without "
        "--method"
    ]


def _nbytes(matrix: Matrix) -> int:
    """Bytes of a compiled matrix, with its scales; floats become float16."""
    from edge.backends.onnx.graph.forms import Blocks

    values = matrix.rows * matrix.columns
    if isinstance(matrix.form, Blocks):
        return values * matrix.form.bits // 8 + values // BLOCK * (2 + matrix.form.minima)
    return 2 * values


def _for_minima(matrix: Matrix) -> int:
    """Bytes that products with the means of blocks take in a compiled context."""
    has_minima = getattr(matrix.form, "minima", False)
    return _MORE_FOR_MINIMA * matrix.rows * matrix.columns // BLOCK if has_minima else 0


def _vectors(layout: Layout) -> int:
    return sum(2 * part.source.rows for parts in layout.vectors.values() for part in parts)
