"""model.edge: what Python writes is what C reads, and a damaged file is an error."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from pathlib import Path
from random import Random

from conftest import GOLDEN
from runtime_library import build, load_runtime

from edge.backends.base import EngineConfig
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.packing.weights import pack_weights
from edge.backends.tvm.targets import TARGETS
from edge.devices.profile import Power
from edge.embed import model_file as m
from edge.embed.model_file import Section
from edge.kv import make_policy
from edge.model.model import open_model


def test_structs_are_those_of_c(tmp_path: Path) -> None:
    lines = []
    for name, struct in m.STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field in struct.names or ():
            at = f"offsetof({name}, {field}), sizeof((({name} *)0)->{field})"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", {at});')
    source = tmp_path / "structs.c"
    source.write_text('#include <stdio.h>\n#include "internal.h"\nint main(void) {\n' + "\n".join(lines) + "}\n")
    said = subprocess.run([build([source])], capture_output=True, text=True, check=True).stdout.splitlines()
    ours = []
    for name, struct in m.STRUCTS.items():
        ours.append(f"{name} {struct.itemsize}")
        ours += [f"{name}.{each} {at} {type_.itemsize}" for each, (type_, at) in (struct.fields or {}).items()]
    assert said == ours


def write_golden(path: Path, name: str = "llama-one-layer", policy: str = "streaming") -> dict[Section, bytes]:
    """A file without a tokenizer. Returns its sections."""
    model = open_model(GOLDEN / f"{name}.gguf")
    layout = make_layout(model.file, model.spec)
    config, rule = EngineConfig(64, 16, "f16", 2, observes=policy == "h2o"), make_policy(policy)
    targets = [target for target in TARGETS if target.machine == "x86_64"]
    sections = {
        Section.CONFIG: m.config_section(
            model, layout, config, rule, 8, sampling=model.sampling(), power=Power(2.0, 1.0, 20.0), kv_bytes=1,
            scratch_bytes=2, peak=3,
        ),
        Section.LAYERS: m.layers_section(layout),
        Section.DESIGNS: m.designs_section(layout, config, targets),
        Section.ANGLES: m.angles_section(model, layout, config),
        Section.STRINGS: m.strings_section(model.spec.name, "", policy, "f16"),
    }  # fmt: skip
    m.write_model(path, sections, bytes(range(32)), model.file, layout)
    packed = path.with_name("packed")
    pack_weights(model.file, layout, packed)
    return sections | {Section.WEIGHTS: packed.read_bytes()}


def test_hashes_are_sha256() -> None:
    library, random = load_runtime("hash.c"), Random(0)
    for length in (*range(130), 1000, 4096):
        data, cut = random.randbytes(length), random.randint(0, length)
        hasher, digest = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
        library.hash_start(hasher)
        for part in (data[:cut], data[cut:]):
            library.hash_add(hasher, part, ctypes.c_uint64(len(part)))
        library.hash_end(hasher, digest)
        assert digest.raw == hashlib.sha256(data).digest(), length
