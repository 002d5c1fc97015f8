"""Compiled passes of the models of `edge models`, as the Python package `edge-kernels` (`edge compile --catalog`).

A design is determined by a model's shape, its block types, the KV dtype and the instruction set. The table of models
has what determines the shape, and mixtures determine the block types, so no weights are needed. A volume holds the
designs of one model for related instruction sets, whose code without dot products of bytes is mostly the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from edge.backends.tuning import model_shape
from edge.backends.tvm.compiler.compiled import is_installed, package_key
from edge.backends.tvm.compiler.package import INDEX, PACKAGE, Index, Volume
from edge.backends.tvm.compiler.volume import volume_keys
from edge.backends.tvm.compiler.wheel import write_wheel
from edge.backends.tvm.design import Design
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.sources import PASS, source_hash
from edge.backends.tvm.targets import target_named
from edge.devices.child import run_child
from edge.devices.output import new_file, work_folder
from edge.errors import InputError, MissingExtraError, UnsupportedError
from edge.model.names.known import KnownModel, known_models, outline_model
from edge.model.reader import read_spec
from edge.records import dataclass
from edge.storage.versions import edge_version

KV_DTYPES = ("f16", "int8")  # what plans choose where nothing was measured
# The least first: each runs the code of those before it.
FAMILIES = {"avx512": ("avx512vnni", "avx512bf16"), "avx2": ("avx2", "avxvnni"), "arm64": ("neon", "dotprod", "i8mm")}
ISAS = tuple(isa for isas in FAMILIES.values() for isa in isas)
_SUFFIX, _TIMEOUT_S = ".xz", 3600.0


@dataclass(frozen=True)
class Job:
    """A volume to make."""

    name: str  # of its file
    model: str
    isas: tuple[str, ...]
    shapes: list[dict[str, object]]  # see `Volume`
    designs: dict[str, Design]  # by key
    complete: bool  # the volume is there, with all of them


@dataclass(frozen=True)
class Made:
    """A finished package. left_out: models without passes, and why."""

    wheel: Path
    index: Index
    left_out: dict[str, str]


Progress = Callable[[str, float], None]
"""Called with the name of a volume, and the fraction of all work that is done."""


def compile_catalog(
    folder: Path, models: Sequence[str] | None = None, isas: Sequence[str] | None = None,
    progress: Progress = lambda name, part: None, finished: Callable[[Path], None] = lambda path: None,
) -> Made:  # fmt: skip
    """Compile these models (default: all) for these instruction sets (default: ISAS) into `folder`, and make a wheel
    there. Volumes that the folder has already are kept, so an interrupted call may be repeated.

    finished: called with each new volume. Raises InputError for unknown names and a folder that cannot be written,
    MissingExtraError without TVM, EngineError if its compiler fails.
    """
    chosen, wanted = _known(models, known_models(), "model"), _known(isas, ISAS, "instruction set")
    if not is_installed():
        raise MissingExtraError("apache-tvm", "tvm")
    package, left_out, jobs = folder / PACKAGE, dict[str, str](), list[Job]()
    try:
        package.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror})") from None
    with work_folder() as work:
        for name, model in known_models().items():
            try:
                jobs += _jobs(model, work, package, wanted if name in chosen else ())
            except UnsupportedError as error:
                left_out[name] = str(error)
    missing = [job for job in jobs if not job.complete]
    for number, job in enumerate(missing):

        def tell(part: float, name: str = job.name, number: int = number) -> None:
            progress(name, (number + part) / len(missing))

        _compile(job, package / job.name, tell)
        finished(package / job.name)
    index = _write_index(package, jobs)
    wheel = write_wheel(folder, PACKAGE, "Compiled kernels of known models for edge", edge_version())
    return Made(wheel, index, {name: why for name, why in left_out.items() if name in chosen})


def _known(names: Sequence[str] | None, known: Sequence[str] | dict[str, KnownModel], what: str) -> list[str]:
    if unknown := sorted(set(names or ()) - set(known)):
        raise InputError(f"{unknown[0]!r} is no {what} of the catalogue: choose {', '.join(known)}")
    return [name for name in known if names is None or name in names]


def _jobs(model: KnownModel, work: Path, package: Path, wanted: Sequence[str]) -> Iterator[Job]:
    """The volumes of a model: those wanted, and those that are there. Raises UnsupportedError where the table says too
    little."""
    if model.epsilon is None:
        raise UnsupportedError("the table of models does not have the epsilon of its norms")
    layouts, shapes = [], list[dict[str, object]]()
    for mixture in model.types:
        file = outline_model(model, mixture, work / "outline.gguf")
        spec = read_spec(file)
        layouts.append(make_layout(file, spec, halve=True))
        shapes.append(model_shape(spec))
    for family, isas in FAMILIES.items():
        name = f"{model.name.replace(':', '-')}.{family}{_SUFFIX}"
        there, designs, had = _keys(package / name), dict[str, Design](), list[str]()
        for isa in isas:
            of_isa = dict[str, Design]()
            for layout in layouts:
                for kv_dtype in KV_DTYPES:
                    design = Design.of(layout, kv_dtype, target_named(isa, ""))
                    with_drafts = replace(design, batches=[design.most_tokens])  # it serves runs without them, too
                    of_isa[package_key(with_drafts)] = with_drafts
            if isa in wanted or of_isa.keys() <= there:
                designs |= of_isa
                had.append(isa)
        if designs:
            yield Job(name, model.name, tuple(had), shapes, designs, complete=designs.keys() <= there)


def _compile(job: Job, path: Path, progress: Callable[[float], None]) -> None:
    with new_file(path) as out:
        request = {"designs": [[key, each.to_json()] for key, each in job.designs.items()], "out": str(out.absolute())}
        run_child(
            "edge.backends.tvm.compiler.volume_child", request, lambda said: progress(said["done"]),
            timeout=_TIMEOUT_S, failure="TVM's compiler failed",
        )  # fmt: skip


def _write_index(package: Path, jobs: Sequence[Job]) -> Index:
    """Describe the jobs' volumes, which are complete now, and remove others, such as those of an older version."""
    volumes = dict[str, Volume]()
    for job in sorted(jobs, key=lambda each: each.name):
        data = (package / job.name).read_bytes()
        digest, keys = hashlib.sha256(data).hexdigest(), sorted(job.designs)
        volumes[job.name] = Volume(len(data), digest, job.model, list(job.isas), job.shapes, keys)
    for path in package.glob(f"*{_SUFFIX}"):
        if path.name not in volumes:
            path.unlink()
    index = Index(edge_version(), source_hash(*PASS), volumes)
    (package / "__init__.py").write_text('"""Data of edge; see its documentation."""\n', encoding="utf-8")
    (package / INDEX).write_text(json.dumps(asdict(index), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return index


def _keys(path: Path) -> set[str]:
    try:
        return set(volume_keys(path.read_bytes()))
    except (OSError, ValueError):
        return set()
