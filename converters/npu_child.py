"""The child process that compiles a model for an NPU, so that a slow or crashing compiler can be ended."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from edge.backends.onnx.folders import check_folder
from edge.backends.onnx.graph.layout import make_layout
from edge.backends.onnx.model_files import ModelFiles
from edge.backends.onnx.npu.contexts import Contexts, compile_contexts
from edge.backends.onnx.providers import find_provider
from edge.converters.npu import NpuTarget, check_target
from edge.devices.child import Say, run_child, serve
from edge.formats.compiled import StaticForm
from edge.formats.gguf import read_gguf
from edge.formats.onnx_folder import read_folder
from edge.model.reader import read_spec
from edge.values import parse


@dataclass(frozen=True)
class Request:
    """The job of the child process."""

    model: str  # a file, or a folder of edge convert
    folder: str  # receives the contexts
    data: str  # name of the weights file in `folder`
    form: StaticForm
    device: str  # name of a profile


def compile_in_child(request: Request, timeout: float) -> Contexts:
    """Compile in a child process, for at most `timeout` seconds.

    Raises the errors of `compile_contexts`; EngineError if the compiler crashes or takes too long.
    """
    failure = f"the compiler for the NPU of {request.device} failed"
    answer = run_child(__name__, asdict(request), lambda said: None, failure=failure, timeout=timeout)
    return parse(Contexts, answer)


def _compile(request: Request, say: Say) -> dict[str, object]:
    path, (_, npu) = Path(request.model), check_target(NpuTarget(request.device))
    assert npu.provider is not None
    file = read_folder(path) if path.is_dir() else read_gguf(path)
    spec = read_spec(file)
    layout = check_folder(file, spec) if file.folder else make_layout(file, spec)
    files = ModelFiles(layout, Path(request.folder), request.data, "")
    provider = find_provider(npu.provider).compiling_for(npu)
    return asdict(compile_contexts(spec, files, request.form, provider))


if __name__ == "__main__":
    serve(lambda request, say: _compile(parse(Request, request), say))
