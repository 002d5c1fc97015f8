"""eyes.edge and the like: an encoder whose inputs are rows, beside a model, in the container of model.edge.

The C runtime maps the file while it encodes (runtime/pass/encoder.c). It has the sections of an encoder of texts that a
pass reads, with a vocabulary of 0 tokens; EMBED says how the last states are normalised; a section of the encoder's own
kind, such as EYES, has all else. The library has a second table of compiled passes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge.apps.c_struct import filled
from edge.apps.sections import embedding, model_file
from edge.apps.sections.model_file import TRUSTED, Section, Source, write_model
from edge.backends.base import EngineConfig
from edge.backends.checks import app_cores, check_cores
from edge.backends.tvm import CPU
from edge.backends.tvm.compiler.exported import exported_designs
from edge.backends.tvm.design import Design
from edge.backends.tvm.packing.cores import round_up
from edge.backends.tvm.packing.layout import PackedLayout, make_layout
from edge.devices.profiles.profile import DeviceProfile, Power
from edge.kv import make_policy
from edge.sampling import SamplingParams
from edge.storage.fingerprint import fingerprint
from edge.types import Progress


@dataclass(frozen=True)
class EncoderFile:
    """An encoder's passes and file. part: its name in the library, such as eyes."""

    part: str
    source: Source
    layout: PackedLayout
    config: EngineConfig  # its capacity: the most rows of a pass
    designs: list[Design]
    own: Mapping[Section, bytes]  # sections of the encoder's own kind
    main: PackedLayout | None = None  # of the model whose embedding and head it shares (`PackedLayout.beside`)
    drafter: str = ""  # the name of its drafter_kind in C; empty: it drafts nothing

    @property
    def name(self) -> str:
        return f"{self.part}.edge"

    @property
    def need(self) -> int:
        """Bytes that encoding takes: weights, which are mapped, and memory."""
        found = CPU().footprint(self.source.spec, self.config)
        return found.weights + found.kv + found.scratch + sum(map(len, self.own.values()))

    def with_threads(self, threads: int) -> EncoderFile:
        """The same with memory for `threads` threads."""
        return replace(self, config=replace(self.config, threads=threads))

    def sections(self) -> dict[Section, bytes]:
        """All but the weights."""
        found = self._sections(0)
        if self.main is None:
            return found
        _, weights = model_file.section_places(found)
        return self._sections(round_up(self.main.nbytes, model_file.WEIGHT_ALIGNMENT) + weights)

    def _sections(self, beside: int) -> dict[Section, bytes]:
        """beside: from the weights of `main` to these."""
        model, layout, config = self.source, self.layout, self.config
        placed = layout if self.main is None else layout.beside(self.main, beside, 0)
        return {
            Section.CONFIG: model_file.config_section(
                model, layout, config, make_policy("full"), 1, chat=False, sampling=SamplingParams(), power=Power(),
                kv_bytes=0, scratch_bytes=0, peak=self.need, beside=beside,
            ),
            Section.LAYERS: model_file.layers_section(model, layout, config.kv_dtype),
            Section.DESIGNS: model_file.designs_section(model, placed, config, [each.target for each in self.designs]),
            Section.ANGLES: model_file.angles_section(model, layout, config),
            Section.STRINGS: model_file.strings_section(model.spec.name, "", "full", config.kv_dtype),
            Section.EMBED: norm_section(layout),
            **self.own,
        }  # fmt: skip

    def trusted_source(self) -> str:
        """Text for trusted.c: an encoder_kind of this part's name."""
        sections = self.sections()
        digest = hashlib.sha256(b"".join(sections.get(each, b"") for each in TRUSTED)).digest()
        passes = f"EDGE_{self.part.upper()}_PASSES"
        return (
            f"extern const compiled_pass {passes}[];\n"
            f'static const encoder_kind {self.part} = {{"{self.name}", {passes}, {{{", ".join(map(str, digest))}}}}};\n'
        )

    def write(self, folder: Path, sha256: str, progress: Progress | None = None) -> None:
        """sha256: of the encoder's own file."""
        write_model(folder / self.name, self.sections(), bytes.fromhex(sha256), self.source.file, self.layout, progress)


def make_encoder(
    part: str, source: Source, profile: DeviceProfile, rows: int, threads: int, kv_dtype: str,
    isas: Sequence[str] | None, own: Mapping[Section, bytes],
) -> EncoderFile:  # fmt: skip
    """Plan an encoder's file; nothing is compiled. rows: the most of a pass. Raises UnsupportedError."""
    check_cores("C runtime of apps", source.spec, app_cores)
    layout = make_layout(source.file, source.spec, halve=profile.system != "web")
    config = EngineConfig(rows, rows, kv_dtype, threads)
    designs = exported_designs(layout, kv_dtype, profile.arch, profile.system, None, isas, part=part)
    return EncoderFile(part, source, layout, config, designs, own)


def nest(part: EncoderFile, folder: Path) -> bytes:
    """The content of a section that is such a file. folder: for a file that is made and deleted."""
    part.write(folder, fingerprint(part.source.file.path).sha256)
    path = folder / part.name
    data = path.read_bytes()
    path.unlink()
    return data


def norm_section(layout: PackedLayout) -> bytes:
    """Section EMBED of an encoder whose states are normalised and nothing else."""
    network = layout.network
    values = {"dimensions": network.hidden, "widest": network.hidden, "end": -1, "prompt": -1}
    return filled(embedding.CONFIG, values | embedding.norm_values(network, layout))
