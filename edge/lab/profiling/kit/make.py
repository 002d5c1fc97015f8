"""A kit: a static program and model.edge, which measure a model on a machine without edge and without Python.

    edge-profile   measures, and prints a result as JSON
    model.edge     weights, tokenizer, chat template and plan, as `edge export` writes them
    kit.json       the description of the measurements, which every result repeats
    README.md

The program ends when the terminal or connection that reads its progress closes, and writes no file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edge.apps.bundle import Bundle, make_sections, prepare
from edge.apps.library import (
    STATIC,
    compile_sources,
    find_toolchain,
    link_program,
    make_library,
)
from edge.apps.mini import SENSORS
from edge.apps.sections.model_file import MODEL, trusted_source, write_model
from edge.backends.tvm import ENGINE as CPU
from edge.backends.tvm.targets import choose_target
from edge.budget import format_bytes
from edge.devices.output import check_folder, new_folder, work_folder
from edge.devices.profiles import HOST, find_profile, host_power
from edge.devices.profiles.profile import DeviceProfile, Power
from edge.errors import UnsupportedError
from edge.lab.prediction.efficiency import weight_shares
from edge.lab.prediction.work import Work, work_of
from edge.lab.profiling.profile import ModelFacts, Settings, model_facts
from edge.model.model import Model
from edge.model.structure.spec import model_key
from edge.plan.plan import Plan
from edge.storage.fingerprint import fingerprint
from edge.storage.versions import own_versions

KIND, SCHEMA = "edge kit", 1
PROGRAM, DESCRIPTION = "edge-profile", "kit.json"
CEILINGS_S, QUICK_CEILINGS_S = 4.0, 1.0

_FOLDER = Path(__file__).parent / "program"
_SOURCES = (*sorted(_FOLDER.glob("*.c")), *sorted(SENSORS.glob("*.c")))
_COMPILE = ("-std=gnu11", "-O2", "-w", "-pthread")

Progress = Callable[[str, float], None]
"""Called with a step in words, and the share of it that is done, from 0 to 1."""


@dataclass(frozen=True)
class Kit:
    """The description of a kit, which its results repeat."""

    device: str  # the name of its profile
    model: ModelFacts
    key: str  # the model's shape and block types, as in the history of runs
    settings: Settings
    plan: Plan
    isas: list[str]
    prompt: int  # tokens, as many as the plan has room for
    contexts: list[int]
    notes: list[str]  # departures from the request
    curve_end: str | None  # why contexts are missing
    integers: float  # as in EngineProfile
    prefill: Work  # of the whole prompt
    decode: Work  # of a token in the middle of the answer
    power: Power  # for estimates of joules where the machine has no sensor
    versions: dict[str, str]
    quick: bool = False
    kind: str = KIND
    schema: int = SCHEMA


def make_kit(
    model: Model, called: str, folder: Path, device: str | DeviceProfile, settings: Settings, *,
    quick: bool = False, force: bool = False, progress: Progress | None = None,
) -> Kit:  # fmt: skip
    """Make `folder`, a kit for a device, given by profile or name. called: the user's name for the model.

    Raises BudgetError if no plan fits, UnsupportedError for unsupported devices and models and without a C compiler,
    InputError if the folder cannot be written, MissingExtraError without TVM, and EngineError if a compiler fails.
    """
    profile = find_profile(device) if isinstance(device, str) else device
    tell = progress or (lambda _step, _part: None)
    if profile.system not in ("linux", "android"):
        raise UnsupportedError(f"{profile.name} runs {profile.system}: kits are for Linux and Android")
    check_folder(folder, _is_kit, force=force)
    toolchain = find_toolchain(profile.arch, "linux")
    isa = choose_target().name if profile.name == HOST else profile.isa
    bundle = prepare(model, profile, settings.options(), isa and [isa], mtp=False)
    kit = describe_kit(bundle, called, settings, quick)
    text = json.dumps(asdict(kit))
    sections, found = make_sections(bundle), fingerprint(model.path)
    with new_folder(folder) as made, work_folder() as work:
        machine = bundle.designs[0].target.machine
        make_library(
            bundle.designs, work, machine, "linux", tables={"trusted.c": trusted_source(sections)},
            progress=partial(tell, "compiling"),
        )  # fmt: skip
        (work / "kit.h").write_text(_header(kit, text), encoding="utf-8")
        objects = compile_sources(toolchain, _COMPILE, _SOURCES, work)
        link_program(toolchain, objects, work / STATIC, made / PROGRAM)
        write_model(
            made / MODEL, sections, bytes.fromhex(found.sha256), model.file, bundle.layout,
            partial(tell, "packing weights"),
        )  # fmt: skip
        found.check()
        (made / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
        sizes = {name: format_bytes((made / name).stat().st_size) for name in (PROGRAM, MODEL)}
        (made / "README.md").write_text(_readme(kit, profile, sizes), encoding="utf-8")
    return kit


def describe_kit(bundle: Bundle, called: str, settings: Settings, quick: bool) -> Kit:
    """The description of a bundle's measurements. called: the user's name for the model."""
    spec, plan, profile = bundle.model.spec, bundle.plan, bundle.profile
    capacity, notes = plan.config.capacity, list[str]()
    room = f"the cache has {capacity:,} rows"
    free = max(1, capacity - settings.answer)
    prompt, contexts = min(settings.prompt, free), [each for each in settings.contexts if each <= free]
    if prompt < settings.prompt:
        notes.append(f"prompts of {prompt:,} instead of {settings.prompt:,} tokens, {room}")
    chunk, footprint = plan.config.chunk, CPU.footprint(spec, plan.config)
    read = (
        work_of(spec, plan.config, footprint, min(chunk, prompt - start), start) for start in range(0, prompt, chunk)
    )
    return Kit(
        device=profile.name,
        model=model_facts(bundle.model, called),
        key=model_key(spec),
        settings=settings,
        plan=plan,
        isas=[each.target.name for each in bundle.designs],
        prompt=prompt,
        contexts=contexts,
        notes=notes,
        curve_end=room if len(contexts) < len(settings.contexts) else None,
        integers=weight_shares(spec, plan.backend, plan.config).get("integers", 0.0),
        prefill=sum(read, Work(0, 0, 0)),
        decode=work_of(spec, plan.config, footprint, 1, prompt + settings.answer // 2),
        power=host_power() if profile.name == HOST else profile.power or _generic(profile.machine),
        versions=own_versions() | CPU.versions(),
        quick=quick,
    )


def _generic(machine: str) -> Power:
    return find_profile("generic-x86" if machine == "x86_64" else "generic-arm64").power or Power()


def _header(kit: Kit, text: str) -> str:
    """The content of kit.h."""
    settings = kit.settings
    numbers = {
        "PROMPT": kit.prompt, "ANSWER": settings.answer, "REPETITIONS": settings.repetitions,
        "KIT_ROWS": max([kit.prompt, *kit.contexts]),
    }  # fmt: skip
    quantities = {
        "SPEED_S": settings.speed_s, "CURVE_S": settings.curve_s, "SUSTAINED_S": settings.sustained_s,
        "CEILINGS_S": QUICK_CEILINGS_S if kit.quick else CEILINGS_S, "WATTS": settings.watts or 0.0,
    }  # fmt: skip
    literal = json.dumps(text).replace("?", "\\?")  # ASCII; C has trigraphs that begin with question marks
    lines = [f"#define {name} {value}u" for name, value in numbers.items()]
    lines += [f"#define {name} {value!r}" for name, value in quantities.items()]
    lines += [f"#define CONTEXTS {', '.join(map(str, kit.contexts or [0]))}", f"#define KIT_JSON {literal}"]
    return "\n".join([*lines, ""])


def _is_kit(folder: Path) -> bool:
    try:
        found: Any = json.loads((folder / DESCRIPTION).read_bytes())
        return bool(found["kind"] == KIND) and {each.name for each in folder.iterdir()} <= {
            PROGRAM, MODEL, DESCRIPTION, "README.md",
        }  # fmt: skip
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _readme(kit: Kit, profile: DeviceProfile, sizes: dict[str, str]) -> str:
    settings, minutes = kit.settings, max(1, round((kit.settings.engine_s + CEILINGS_S) / 60))
    held = f"held to {settings.watts:g} W by pauses" if settings.watts else "without a pause"
    long_run = f", and {settings.sustained_s:g} s of answers {held}" if settings.sustained_s else ""
    return f"""# {kit.model.label} on {profile.description}

This folder measures a language model on a machine with Linux or Android ({profile.machine}; instruction set
{", ".join(kit.isas)}). It needs no installation, no network and no rights. Copy it there, and run

    ./{PROGRAM} > result.json

which takes about {minutes} min and says how far it is. Bring result.json back to a machine with edge:

    edge profile --read result.json -o report.html
    edge devices add my-device result.json

The program measures the time to load the model, prompts of {kit.prompt} tokens and answers of {settings.answer}, both
behind {", ".join(map(str, kit.contexts)) or "no further"} rows of context, on fewer threads, memory, temperature,
clock, battery or energy counters where the kernel shows them{long_run}, and how fast the machine reads memory and
multiplies. It writes nothing but its standard output, and the result holds nothing but figures, the processor's
description and what is in {DESCRIPTION}.

- {PROGRAM} ({sizes[PROGRAM]}): a static program, built from edge {kit.versions["edge"]}
- {MODEL} ({sizes[MODEL]}): the model, which is read from beside the program
- {DESCRIPTION}: what the program was told to measure
"""
