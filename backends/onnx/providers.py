"""ONNX Runtime's execution providers, which run graphs on CPUs, GPUs and NPUs.

Some are built in. Others are plugins, in packages of their own (`onnxruntime_qnn`, …), which name their library and
providers; they are registered on demand.

NPUs are static: a vendor's compiler makes a context of a graph, and needs every size fixed (graph/static.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edge.devices.profiles.profile import Npu
from edge.errors import EngineError, InputError, MissingExtraError
from edge.model.structure.spec import ModelSpec
from edge.records import dataclass

_log = logging.getLogger("edge")
_SUFFIX = "ExecutionProvider"
_PLUGINS = {"qnn": "onnxruntime_qnn"}  # packages that `--provider` may name before they are installed; extras likewise
_STATIC = {"qnn", "cpu-static"}  # also where there is no NPU: QNN's compiler then emulates one
_NAMES = "get_ep_names"  # a function that every plugin's package has
_EMULATED_PARAMETERS = 7e6  # per second: a token of SmolLM2-135M takes QNN's emulator some 20 s on two cores
_EMULATED = (57, "75")  # soc_model and htp_arch of the Snapdragon 8 Gen 3, unless another is asked for


@dataclass(frozen=True)
class Provider:
    """An execution provider."""

    name: str  # as for `--provider`
    ort_name: str  # ONNX Runtime's name
    devices: tuple[Any, ...] = ()  # a plugin's `OrtEpDevice`s
    options: Mapping[str, str] = field(default_factory=dict)  # of these devices
    static: bool = False  # runs graphs of fixed sizes
    emulated: bool = False  # computes on the CPU in place of an NPU

    def compiling_for(self, npu: Npu | None) -> Provider:
        """The provider with the compiler's options for a chip; None: this device's own, or the one to emulate."""
        if self.name != "qnn" or (npu is None and not self.emulated):
            return self
        soc, arch = (npu.soc, npu.arch) if npu else _EMULATED
        said = {"soc_model": soc, "htp_arch": arch}
        return replace(self, options={**self.options, **{name: str(value) for name, value in said.items() if value}})


CPU = Provider("cpu", f"CPU{_SUFFIX}")
# The graphs of NPUs on the CPU: to compare with, and to see what a folder was compiled from.
STATIC_CPU = Provider("cpu-static", CPU.ort_name, static=True)


def is_static(name: str | None) -> bool:
    """Whether this provider runs graphs of fixed sizes. Raises as `find_provider`, except for known static providers,
    which need not be installed."""
    if name is None or name.lower() == CPU.name:
        return False
    return name.lower() in _STATIC or find_provider(name).static


def check_installed() -> None:
    """Raise MissingExtraError without ONNX Runtime."""
    if find_spec("onnxruntime") is None:
        raise MissingExtraError("onnxruntime", "onnx")


def find_provider(name: str) -> Provider:
    """The execution provider of this `--provider`. Raises InputError, MissingExtraError, EngineError if a plugin cannot
    be loaded."""
    if (name := name.lower()) == STATIC_CPU.name:
        return STATIC_CPU
    if name in _PLUGINS and find_spec(_PLUGINS[name]) is None:
        raise MissingExtraError(_PLUGINS[name].replace("_", "-"), name)
    check_installed()
    import onnxruntime

    if module := _plugin_names().get(name):
        return _plugin(module, name)  # also where it was registered before, and so is among those below
    built_in = {_short(each): each for each in onnxruntime.get_available_providers()}
    if name not in built_in:
        raise InputError(f"--provider {name!r} is not available: choose {', '.join(provider_names())}")
    return Provider(name, str(built_in[name]))


def provider_names() -> list[str]:
    """All providers available here. Raises MissingExtraError."""
    check_installed()
    import onnxruntime

    return sorted({*map(_short, onnxruntime.get_available_providers()), STATIC_CPU.name, *_plugin_names()})


def _short(ort_name: str) -> str:
    return ort_name.removesuffix(_SUFFIX).lower()


@cache
def _plugin_names() -> dict[str, str]:
    """Providers of installed plugins, with their modules. No other module is imported."""
    from importlib.metadata import packages_distributions

    found = {}
    for module in packages_distributions():
        spec = find_spec(module) if module.startswith("onnxruntime_") else None
        if spec and spec.origin and _NAMES in Path(spec.origin).read_text(errors="replace"):
            for each in getattr(import_module(module), _NAMES)():
                found[_short(each)] = module
    return found


@cache
def _plugin(module: str, name: str) -> Provider:
    """Register a plugin; use its NPUs if there are any, else all devices."""
    import onnxruntime

    package = import_module(module)
    ort_name = next(each for each in getattr(package, _NAMES)() if _short(each) == name)
    with explained(f"--provider={name}: ONNX Runtime cannot load the plugin"):
        onnxruntime.register_execution_provider_library(ort_name, package.get_library_path())
    devices = [each for each in onnxruntime.get_ep_devices() if each.ep_name == ort_name]
    if not devices:
        raise EngineError(f"--provider={name}: {module} finds no device here that it could run on")
    kinds = onnxruntime.OrtHardwareDeviceType
    npus = [each for each in devices if each.device.type == kinds.NPU]
    options = {}
    if name == "qnn":
        # Without the latter, the CPU would convert inputs and outputs.
        options = {"backend_path": package.get_qnn_htp_path(), "offload_graph_io_quantization": "0"}
    emulated = name == "qnn" and not npus
    return Provider(name, ort_name, tuple(npus or devices[:1]), options, bool(npus) or name in _STATIC, emulated)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Convert ONNX Runtime's exceptions into EngineErrors."""
    try:
        yield
    except Exception as error:  # some of its errors are RuntimeErrors, the others share no base class
        if not (type(error) is RuntimeError or type(error).__module__.startswith("onnxruntime")):
            raise
        raise EngineError(f"{what} ({' '.join(str(error).split())[:300]})") from None


def warn_emulated(spec: ModelSpec, provider: Provider, what: str) -> None:
    """Log what an emulated NPU takes. what: such as "a token"."""
    seconds = spec.parameters / _EMULATED_PARAMETERS
    _log.warning("no NPU here: --provider %s emulates one, where %s takes about %.2g s", provider.name, what, seconds)
