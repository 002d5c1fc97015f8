"""The command line of a setting, which converts the model if necessary, then runs or exports it."""

from __future__ import annotations

import shlex
from pathlib import PurePath

from edge.apps.planning import APP_SYSTEMS
from edge.devices.profiles.profile import DeviceProfile
from edge.lab.quality.matrix import FULL
from edge.lab.searching.space import Candidate
from edge.options import AUTO, Options


def command_of(candidate: Candidate, profile: DeviceProfile, options: Options, tokens: int) -> str:
    """The command line, for a shell. options: of the search. tokens: rows of a full cache, for prompt and answer."""
    weights, cell, steps, model = candidate.weights, candidate.cell, [], candidate.weights.model
    if weights.type is not None:
        kind = weights.type.lower()
        made = f"{PurePath(model).name.removesuffix('.gguf').replace(':', '-')}-{kind}.gguf"
        importance = ["--importance"] if weights.by_importance else []
        steps, model = [["edge", "quantize", model, made, kind, *importance]], made
    exported = profile.system in APP_SYSTEMS
    settings = ["--kv-policy", cell.policy, "--max-kv-size", str(tokens if cell.policy == FULL else candidate.rows)]
    settings += ["--kv-dtype", cell.kv_dtype] if cell.kv_dtype else []
    settings += ["--threads", str(candidate.threads)]
    settings += ["--memory", _bytes(options.memory)] if options.memory else []
    if exported:
        steps.append(["edge", "export", model, "--device", profile.name, "-o", "bundle", *settings])
    else:
        settings += ["--energy", f"{options.energy:g}J"] if options.energy else []
        settings += ["--backend", options.backend] if options.backend != AUTO else []
        steps.append(["edge", "run", model, *settings])
    return " && ".join(shlex.join(each) for each in steps)


def _bytes(count: int) -> str:
    """A size in MiB if that is exact, else in bytes."""
    return f"{count >> 20}MiB" if count % (1 << 20) == 0 else str(count)
