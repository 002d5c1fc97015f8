"""A page that measures a model in a browser: on a phone, without installing anything.

index.html, kit.js, ceiling.js    the page
ceilings.wasm                     measures the ceilings of reading and multiplying
edge/, model.edge, manifest.json  as `edge export --device web` writes them
kit.json                          the description of the measurements, which every result repeats
README.md
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path

from edge.apps.bundle import describe, make_sections, prepare
from edge.apps.manifest import MANIFEST, check_target, manifest_text, seal
from edge.apps.module import make_own_module
from edge.apps.sections.model_file import MODEL, trusted_source, write_model
from edge.apps.site import HEADERS_FILE, write_package
from edge.devices.output import new_folder
from edge.devices.profiles import find_profile
from edge.lab.profiling.kit.make import DESCRIPTION, Kit, Progress, describe_kit
from edge.lab.profiling.profile import Settings
from edge.model.model import Model
from edge.storage.fingerprint import fingerprint

_PAGE = Path(__file__).parent / "page"
_CEILINGS = "ceilings.c"


def make_page(
    model: Model, called: str, folder: Path, settings: Settings, *,
    quick: bool = False, force: bool = False, progress: Progress | None = None,
) -> Kit:  # fmt: skip
    """Make `folder`, which any web server can serve. called: the user's name for the model. Raises as `make_kit`."""
    tell = progress or (lambda _step, _part: None)
    check_target(folder, force=force)
    bundle = prepare(model, find_profile("web"), settings.options(), mtp=False)
    kit = describe_kit(bundle, called, settings, quick)
    sections, found = make_sections(bundle), fingerprint(model.path)
    with new_folder(folder) as made:
        write_package(bundle.designs, trusted_source(sections), made, partial(tell, "compiling"))
        make_own_module(_PAGE / _CEILINGS, (made / _CEILINGS).with_suffix(".wasm"))
        for path in _PAGE.iterdir():
            if path.name != _CEILINGS:
                shutil.copyfile(path, made / path.name)
        shutil.copyfile(HEADERS_FILE, made / HEADERS_FILE.name)
        write_model(
            made / MODEL, sections, bytes.fromhex(found.sha256), model.file, bundle.layout,
            partial(tell, "packing weights"),
        )  # fmt: skip
        found.check()
        (made / DESCRIPTION).write_text(json.dumps(asdict(kit)) + "\n", encoding="utf-8")
        (made / "README.md").write_text(_README.format(label=kit.model.label, folder=folder.name), encoding="utf-8")
        manifest = seal(describe(bundle, found.sha256, made))
        (made / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
    return kit


_README = """# {label} in a page

This folder measures a language model in a browser. Any web server can serve it; for all of a device's cores it must
come over HTTPS (or from localhost) with the headers in `_headers`. For a first look here:

    edge serve-site {folder}

Open its address on the device, press Measure, and save result.json; nothing else leaves the device. Bring it back to a
machine with edge:

    edge profile --read result.json -o report.html
"""
