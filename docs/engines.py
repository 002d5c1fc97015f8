"""Writes docs/engines.md, which engine runs which model, from what the engines say of cores: python docs/engines.py"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from edge.backends import backend_names, engine_named
from edge.backends.checks import app_cores, check_cores
from edge.converters import coreml
from edge.devices.output import work_folder
from edge.errors import EdgeError, speaking
from edge.formats.gguf import GGUFFile, read_gguf
from edge.model.cores import (
    Attention,
    Core,
    DeltaNet,
    Dense,
    Experts,
    KimiDelta,
    Latent,
    Mamba,
    PerLayerInput,
    Rope,
    SelectiveScan,
    ShortConvolution,
)
from edge.model.names.known import known_models, outline_model
from edge.model.reader import read_spec
from edge.model.structure.spec import ModelSpec

PAGE = Path(__file__).with_name("engines.md")
GOLDEN = Path(__file__).parents[1] / "tests" / "golden"

_INTRODUCTION = """\
# Engines and models

Written by `python docs/engines.py` from what the engines say of the parts of a model's pass (`supports`, and
`check_supported`): edit them, not this page. `edge inspect MODEL` says the same of a file.

`cpu` is the native engine, whose passes also run in apps and pages that `edge export` makes; `reference` computes in
NumPy, and is there for comparisons; every model has `llamacpp` to fall back on. `yes`: with all KV policies that the
engine has ([KV cache](kv-cache.md)), and within `--memory`.
"""
_ATTENTION = Attention(heads=2, kv_heads=1, head_dim=8, scale=1.0)
_CORES: dict[str, Core] = {
    "attention, with a window or without": _ATTENTION,
    "… of encoders, which see whole texts": replace(_ATTENTION, causal=False),
    "… with an output gate": replace(_ATTENTION, gated=True),
    "… with sinks": replace(_ATTENTION, sinks=True),
    "… with rows of an earlier layer": replace(_ATTENTION, rows_of=0),
    "… with normalised values": replace(_ATTENTION, unit_values=True),
    "… with latent rows": replace(
        _ATTENTION,
        head_dim=576,
        value_dim=512,
        shared_values=True,
        latent=Latent(128, 128),
        rope=Rope(64, 1e4, first=512),
    ),
    "feed-forward networks": Dense(8),
    Experts.kind: Experts(number=4, used=2, ffn=8),
    DeltaNet.kind: DeltaNet(heads=16, key_heads=16, size=128, value_size=128, kernel=4),
    KimiDelta.kind: KimiDelta(heads=32, size=128, kernel=4, rank=128),
    Mamba.kind: Mamba(heads=16, groups=1, size=128, head_dim=64, kernel=4),
    SelectiveScan.kind: SelectiveScan(width=1536, size=16, rank=48, kernel=4),
    ShortConvolution.kind: ShortConvolution(hidden=1024, kernel=3),
    PerLayerInput.kind: PerLayerInput(8),
}


def page() -> str:
    """The whole page, as Markdown."""
    with work_folder() as folder, speaking("flags"):
        known = {
            name: read_gguf(outline_model(model, "Q4_0", folder / f"{index}.gguf").path)
            for index, (name, model) in enumerate(known_models().items())
        }
        small = map(read_gguf, sorted([*GOLDEN.glob("*.gguf"), *GOLDEN.glob("encoders/*.gguf")]))
        golden = {str(file.metadata["general.architecture"]): file for file in small}
        parts = [
            _INTRODUCTION,
            "## Cores\n",
            "The parts of layers, and who runs them. Core ML: what `edge convert` writes for Apple's devices.\n",
            *_cores(),
            "## The models of `edge models --fits`\n",
            *_section(known),
            "## Architectures\n",
            "As GGUF files name them, by the small random models of the tests.\n",
            *_section(dict(sorted(golden.items()))),
        ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _checks() -> dict[str, Callable[[GGUFFile, ModelSpec], None]]:
    """What raises an error for a model that an engine does not run, by the table's columns."""
    names = [name for name in backend_names() if name != "llamacpp"]
    checks = {f"`{name}`": engine_named(name).check_elsewhere for name in names}
    columns: dict[str, Callable[[GGUFFile, ModelSpec], None]] = {
        name: lambda file, spec, check=check: check(file, spec, "linux") for name, check in checks.items()
    }
    return columns | {"apps, pages": lambda file, spec: _check_apps(spec)}


def _check_apps(spec: ModelSpec) -> None:
    check_cores("C runtime of apps", spec, app_cores)


def _cores() -> Iterator[str]:
    engines = {f"`{name}`": engine_named(name).supports for name in backend_names() if name != "llamacpp"}
    columns = engines | {"apps, pages": app_cores, "Core ML": coreml.supports}
    lines = [["core", *columns], ["---"] * (1 + len(columns))]
    lines += [
        [name, *("no" if supports(core) else "yes" for supports in columns.values())] for name, core in _CORES.items()
    ]
    yield "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _section(files: dict[str, GGUFFile]) -> Iterator[str]:
    notes: dict[str, int] = {}
    checks = _checks()
    lines = [["model", *checks], ["---"] * (1 + len(checks))]
    for name, file in files.items():
        lines.append([f"`{name}`", *(_cell(file, check, notes) for check in checks.values())])
    yield "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    yield "\n".join(f"- ({number}) {reason}" for reason, number in notes.items()) + "\n"


def _cell(file: GGUFFile, check: Callable[[GGUFFile, ModelSpec], None], notes: dict[str, int]) -> str:
    try:
        check(file, read_spec(file))
    except EdgeError as error:
        reason = str(error).removeprefix(f"{file.path}: ").partition(": use ")[0]
        reason = reason.replace(f"{file.metadata['general.architecture']} models", "these models")
        return f"no ({notes.setdefault(reason, len(notes) + 1)})"
    return "yes"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
