"""Download of models by name: the choice of a repository's file, by a plan made before the download, and the
download."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge.budget import format_bytes
from edge.devices.output import check_path
from edge.devices.profiles import HOST, find_profile
from edge.errors import BudgetError, EdgeError, InputError, MissingExtraError, UnsupportedError, did_you_mean
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_parts import join, names_of_parts, whole_name
from edge.hub.cache import pointer_of
from edge.hub.download import Notice, OnBytes, download, download_each, is_here
from edge.hub.header import read_header
from edge.hub.names import Reference
from edge.hub.quants import label_of, matches, runnable, usual, with_joined
from edge.hub.repository import RemoteFile, Repository, look_up
from edge.model.names.catalog import find_local, hub_reference
from edge.model.names.known import known_models
from edge.model.reader import read_spec
from edge.options import Options, takes_options
from edge.plan.device import TOKENIZER_BYTES, plan_for
from edge.plan.plan import Plan
from edge.storage import cache

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Python 3.10 has none

    from edge.keywords import Keywords

_TRIED = 4  # the most headers that are read, of several MB each


@dataclass(frozen=True)
class Offer:
    """A file to download, with its plan."""

    repository: Repository
    file: RemoteFile
    header: GGUFFile
    plan: Plan
    candidates: int  # number of files that it was chosen from

    @property
    def is_here(self) -> bool:
        if self.file.parts:
            return cache.find("models", self.file.hash, ".gguf") is not None
        return is_here(pointer_of(self.repository, self.file), self.file)

    def about(self) -> dict[str, Any]:
        """The offer for JSON."""
        repository, file = self.repository, self.file
        return {
            "repository": repository.name, "commit": repository.commit, "licence": repository.licence,
            "file": file.path, "bytes": file.size, "hash": file.hash, "quant": label_of(file.path),
        }  # fmt: skip

    def __str__(self) -> str:
        quant = label_of(self.file.path)
        chosen = f" of {self.candidates} quantizations, the best whose plan fits" if self.candidates > 1 else ""
        return (
            f"{self.repository.name}/{self.file.path}: {format_bytes(self.file.size)}"
            f"{f', {quant}' if quant else ''}{chosen}, licence {self.repository.licence or 'not stated'}"
        )


@takes_options
def pull(
    model: str,
    options: Options | None = None,
    *,
    quant: str | None = None,
    device: str = HOST,
    progress: OnBytes = lambda done, total: None,
    notice: Notice = lambda line: None,
    **keywords: Unpack[Keywords],
) -> Path:
    """Download a model from the Hub, and return the path of its file in the Hub's cache folder.

    model: a short name (`qwen3:0.6b`), `hf.co/USER/REPO`, `USER/REPO`, optionally with `:QUANT`. quant: the same; by
    default the best from 8 to 4 bits whose plan fits. device: the device that it must fit, by its name in `edge devices
    list`. progress: called with bytes done and bytes of the file; notice: called with lines for people. An encoder of
    pictures or sounds in the repository that belongs to the model comes, too, unless mmproj is "off". The keywords are
    options:

    OPTIONS

    Raises BudgetError before the download if nothing fits, DownloadError, CacheError, InputError, UnsupportedError.
    """
    options = Options.of(options, **keywords)
    chosen = offer(model, options, quant=quant, device=device)
    path = take(chosen, progress=progress, notice=notice)
    take_encoder(chosen, options, progress=progress, notice=notice)
    return path


def offer(model: str, options: Options, *, quant: str | None = None, device: str = HOST) -> Offer:
    """Choose the file that `pull` would download: asks the Hub, and reads headers. Raises as `pull`."""
    check_path("model", model, "a path or a name")
    reference = hub_reference(model)
    if reference is None:
        near = did_you_mean(model, known_models()) if ":" in model else ""
        hint = near or "write qwen3:0.6b, say, or hf.co/USER/REPO"
        raise InputError(f"{model[:200]!r} is no model of the Hub: {hint}")
    if quant is not None:
        reference = Reference(reference.repository, reference.revision, quant.upper())
    repository = look_up(reference, _near(reference.repository))
    return _choose(repository, _candidates(repository, reference), options, device)


def take(chosen: Offer, *, progress: OnBytes = lambda done, total: None, notice: Notice = lambda line: None) -> Path:
    """Download an offer's file, unless it is here; a model in several files is joined in edge's cache folder, which
    takes as many bytes again. Raises DownloadError, CacheError."""
    file = chosen.file
    if file.parts:
        return _take_parts(chosen.repository, file, progress, notice)
    return download(chosen.repository, chosen.file, progress=progress, notice=notice)


def take_encoder(
    chosen: Offer, options: Options, *, progress: OnBytes = lambda done, total: None,
    notice: Notice = lambda line: None,
) -> Path | None:  # fmt: skip
    """Download the encoder that belongs to an offer's model, unless it is here; None if there is none. In 8 bits or, if
    the repository lacks that, 16. A failure leaves it out."""
    if options.mmproj is not None:  # "off", or a file of the user's own
        return None
    repository, hidden = chosen.repository, read_spec(chosen.header).hidden
    named = [file for file in repository.files if re.search(r"mmproj.*\.gguf$", file.path, re.IGNORECASE)]
    for file in sorted(named, key=_preference)[:_TRIED]:
        try:
            fields = read_header(repository, file).metadata
            if hidden in (fields.get("clip.vision.projection_dim"), fields.get("clip.audio.projection_dim")):
                notice(f"its encoder: {file.path}, {format_bytes(file.size)}")
                return download(repository, file, progress=progress, notice=notice)
        except EdgeError as error:
            notice(f"left out: {error}")
    return None


def _preference(file: RemoteFile) -> tuple[int, int, str]:
    order = ("Q8_0", "F16", "BF16", "F32")
    label = label_of(file.path)
    return order.index(label) if label in order else len(order), file.size, file.path


def _take_parts(repository: Repository, file: RemoteFile, progress: OnBytes, notice: Notice) -> Path:
    if found := cache.find("models", file.hash, ".gguf"):
        return found
    paths = list(download_each(repository, file.parts, progress=progress, notice=notice))
    name = f"{repository.name}/{file.path}"
    notice(f"joining the {len(paths)} parts of {name}")
    return cache.find_or_make(
        "models", file.hash, ".gguf", lambda target: join(paths, target), about=name, expected=file.size
    )


def ensure(
    model: str | Path,
    options: Options,
    *,
    progress: OnBytes = lambda done, total: None,
    notice: Notice = lambda line: None,
) -> Path:
    """The file or folder of MODEL, downloaded if it is on the Hub and not here.

    Raises as `pull`, and as `edge.model.names.catalog.find_model`.
    """
    if found := find_local(model):
        return found
    chosen = offer(str(model), options)
    notice(f"downloading {chosen}")
    return take(chosen, progress=progress, notice=notice)


def _candidates(repository: Repository, reference: Reference) -> list[RemoteFile]:
    """Files that a reference can mean, best first. Raises InputError, UnsupportedError."""
    files, name = with_joined(repository.files), repository.name
    if reference.file is not None:
        parts = names_of_parts(reference.file)
        wanted = whole_name(reference.file) if parts else reference.file
        found = [file for file in (*repository.files, *files) if file.path == wanted]
        if not found:
            near = did_you_mean(reference.file, [file.path for file in files], 1)
            raise InputError(f"{name} has no file {reference.file}{f' ({near})' if near else ''}")
        if not runnable(wanted):
            raise UnsupportedError(f"{name}/{reference.file} is no GGUF file of a whole model")
        return found[:1]
    if reference.quant is not None:
        labels = sorted({label for file in files if (label := label_of(file.path))})
        found = [file for file in files if matches(label_of(file.path), reference.quant)]
        if not found:
            raise InputError(
                f"{name} has no {reference.quant}: {', '.join(labels) or 'its files state no quantization'}"
            )
        return [min(found, key=lambda file: (len(file.path), file.path))]
    if files:
        return usual(files)
    if any(file.path.endswith(".safetensors") for file in repository.files):
        raise UnsupportedError(f"{name} has no GGUF file: edge pull {name} --convert=q4_0 makes one of its checkpoint")
    raise UnsupportedError(f"{name} has no GGUF file: edge pulls models in GGUF")


def _choose(repository: Repository, candidates: Sequence[RemoteFile], options: Options, device: str) -> Offer:
    """The first file whose plan fits with all weights in memory; else the smallest that fits at all.

    A file that does not fit shows how many bytes are needed besides weights. Further files that are too large are then
    skipped without reading their headers. Raises the BudgetError that asks for the least memory, or the first file's
    error if no engine runs any.
    """
    profile = find_profile(device)
    errors: list[EdgeError] = []
    slow: Offer | None = None
    most: float | None = None  # bytes of weights in memory that may fit
    share = 1.0  # of a file that is in memory
    left = _TRIED
    smallest = min(candidates, key=lambda file: file.size)
    for file in candidates:
        if file != smallest and (left <= 1 or (most is not None and share * file.size > most)):
            continue
        left -= 1
        header = None
        try:
            header = read_header(repository, file)
            spec = read_spec(header)
            share = 1 - spec.table_bytes / file.size if spec.network and spec.network.layer_inputs else 1.0
            plan = plan_for(profile, header, spec, options, TOKENIZER_BYTES * spec.vocab)
        except (BudgetError, UnsupportedError, MissingExtraError) as error:
            errors.append(error if header is None else _named(error, header, f"{repository.name}/{file.path}"))
            if isinstance(error, BudgetError) and error.smallest is not None and options.memory is not None:
                most = options.memory - max(0, error.smallest - share * file.size)
            continue
        found = Offer(repository, file, header, plan, len(candidates))
        if not plan.bytes.streamed:
            return found
        if slow is None or file.size < slow.file.size:
            slow = found
        most = plan.limit - plan.bytes.reserve - (plan.bytes.total - plan.bytes.weights)
    if slow is not None:
        return slow
    raise min((each for each in errors if isinstance(each, BudgetError)), key=_asks, default=errors[0])


def _named(error: EdgeError, header: GGUFFile, name: str) -> EdgeError:
    """The error with the file's name in place of its header's."""
    return error if str(header.path) not in str(error) else type(error)(str(error).replace(str(header.path), name))


def _asks(error: BudgetError) -> int:
    return error.smallest or sys.maxsize


def _near(repository: str) -> str:
    """A hint of similar repositories of the table."""
    return did_you_mean(repository, [each.repository for each in known_models().values()], at_least=0.8)
