"""Bundles of small models for this machine, and the same conversations with a bundle and with edge itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from ctypes_bundle import MODEL, open_bundle
from runtime_library import C_FILES, GPU_FILES, NPU_FILES, build
from shared import FOLDER, made_once

pytest.importorskip("tvm_ffi")  # so that files which import this are skipped as a whole
if shutil.which("cc") is None:
    pytest.skip("no C compiler cc", allow_module_level=True)

import edge
from edge.apps.bundle import export, make_sections, prepare, with_gpu
from edge.apps.enums import Finish, Role
from edge.apps.sections.chat import exported_think
from edge.backends.tvm.compiler.exported import exported_objects, passes_source
from edge.backends.tvm.targets import choose_target
from edge.devices.profiles import HOST, find_profile
from edge.model.model import Model, open_model
from edge.options import Options
from edge.run.sampling.sampler import Sampler
from edge.run.sequences.sequence import TokenSequence
from edge.run.session import Session
from edge.sampling import SamplingParams

Text = str | Sequence[int]
Answer = tuple[list[int], str, Finish]


def model_of(name: str) -> Model:
    return open_model(GOLDEN / f"{name}.gguf" if (GOLDEN / f"{name}.gguf").exists() else name)


def attend_in_floats(patch: pytest.MonkeyPatch) -> None:
    """Choose an instruction set without attention in pairs of BF16."""
    if choose_target().pair_rows:
        patch.setenv("EDGE_ISA", {"avx512bf16": "avx512vnni", "i8mm": "dotprod"}[choose_target().name])


@lru_cache
def bundle_of(name: str, **options: Any) -> Path:
    """A bundle's folder. It is compiled for this machine's instruction set only."""

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if options.get("gpu") and options.get("kv_dtype") == "int4":
                attend_in_floats(patch)  # normals of keys come from attention in float32, as a GPU's
            export(model_of(name), folder, isas=[choose_target().name], **options)

    return made_once(make, name, "bundle", sorted(options.items()))


@lru_cache
def bundle_sources(
    name: str, *, lora_rank: int = 0, gpu: bool = False, npu: bool = False, **options: Any
) -> tuple[Path, list[Path]]:  # fmt: skip
    """model.edge, and what belongs to it besides the runtime, which is to be built otherwise: tables and objects."""
    chosen, isas = Options().updated(**options), [choose_target().name]
    bundle = prepare(model_of(name), find_profile(HOST), chosen, isas, lora_rank, gpu=gpu, npu=npu)
    if gpu:
        bundle = with_gpu(bundle)
    more: dict[str, Any] = ({"lora_rank": lora_rank} if lora_rank else {}) | ({"gpu": True} if gpu else {})
    more |= {"npu": True} if npu else {}
    folder = bundle_of(name, **options, **more)
    trusted = bundle.trusted_source(make_sections(bundle))
    tables = write_tables({"trusted.c": trusted, "passes.c": passes_source(bundle.all_designs)})
    return folder / MODEL, [*tables, *exported_objects(bundle.all_designs)]


# Files of tests that take the place of the runtime's.
REPLACED = {"eager_drafts.c": "drafts.c", "eager_model.c": "drafts.c", "model_fuzz.c": "platform.c"}


@lru_cache
def build_with(sources: tuple[str | Path, ...], name: str, *flags: str, **options: Any) -> tuple[Path, Path]:
    """model.edge, and a program of its parts, the runtime and more C files; with -shared, a library."""
    model, parts = bundle_sources(name, **options)
    runtime = [*C_FILES, *(GPU_FILES if options.get("gpu") else ()), *(NPU_FILES if options.get("npu") else ())]
    replaced = {REPLACED.get(str(each)) for each in sources}
    kept = [path for path in runtime if path.name not in replaced]
    return model, build([*sources, *kept, *parts], flags, ".so" if "-shared" in flags else "")


def refused(error: type[Exception], says: str, call: Callable[..., object], *arguments: Any, **more: Any) -> None:
    """The call raises this error."""
    with pytest.raises(error, match=says):
        call(*arguments, **more)


def write_tables(texts: dict[str, str]) -> list[Path]:
    """C files of these names in a new folder."""
    folder = Path(mkdtemp(dir=FOLDER))
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


@dataclass
class Pair:
    """One conversation twice. Every call makes sure that both say the same."""

    python: Session
    exported: Any  # a session in another process or library, as `BundleSession`
    recorded: list[int]
    begun: bool = False

    def ask(
        self, text: Text, *, raw: bool = False, system: str | None = None, told: bool = False, **options: Any
    ) -> Answer:
        """told: the exported session has the system's text already. options: fields of edge_options, and logit_bias."""
        self.exported.set(**{name: value for name, value in options.items() if name != "logit_bias"})
        if "logit_bias" in options:
            self.exported.bias(options["logit_bias"])
        if system is not None and not told:
            self.exported.append(Role.SYSTEM, system)
        role = Role.RAW if raw else Role.USER if isinstance(text, str) else Role.IDS
        found = self.exported.answer(text, role)
        assert found == self._python(text, raw, system, **options)
        self.check_rows()
        return found

    def forget(self) -> None:
        self.exported.rewind()
        self.begun = False

    def check_rows(self) -> None:
        use, kv = self.exported.use(), self.python.engine.kv
        assert (use["rows"], use["capacity"]) == (kv.capacity - kv.free, kv.capacity)

    def _python(self, text: Text, raw: bool, system: str | None, **options: Any) -> Answer:
        self.recorded.clear()
        names = SamplingParams.__dataclass_fields__
        sampling = self.python.model.sampling(**{name: options[name] for name in options.keys() & names})
        template = self.python.model.template
        chosen = {} if template is None or raw or not isinstance(text, str) else {"think": exported_think(template)}
        answer = self.python.generate(
            text if isinstance(text, str) else np.array(text, np.int32),
            max_tokens=options.get("max_tokens") or None,
            sampling=sampling,
            stop=list(options.get("stop", ())),
            ignore_eos=bool(options.get("ignore_eos")),
            system=system,
            raw=raw,
            follow_up=self.begun,
            time_limit=options.get("time"),
            energy_limit=options.get("energy"),
            **chosen,
        )
        self.begun = True
        report = self.python.report
        assert report is not None
        return self.recorded[: report.tokens.generated], answer, Finish[report.stop_reason.upper()]


@contextmanager
def pair_of(
    name: str, *, python: dict[str, Any] | None = None, bundle: dict[str, Any] | None = None, eager: str = "",
    **options: Any,
) -> Iterator[Pair]:  # fmt: skip
    """options: of the plan, for both. python, bundle: more for one of them. eager: a C file of tests that drafts
    always."""
    of_bundle = options | (bundle or {})
    library = build_with((eager,), name, "-shared", "-fPIC", **of_bundle)[1] if eager else None
    with (
        recorded_session(name, **options | (python or {})) as (session, recorded),
        open_bundle(bundle_of(name, **of_bundle), library) as opened,
        opened.session() as exported,
    ):
        yield Pair(session, exported, recorded)


@contextmanager
def recorded_session(name: str, **options: Any) -> Iterator[tuple[Session, list[int]]]:
    """edge's own session, and a list to which it adds the tokens that it generates."""
    recorded: list[int] = []
    following = TokenSequence.next_token

    def record(sequence: TokenSequence, sample: Sampler) -> int:
        recorded.append(following(sequence, sample))
        return recorded[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenSequence, "next_token", record)
        with edge.load(model_of(name), backend="cpu", **options) as python:
            yield python, recorded
