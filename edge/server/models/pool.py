"""The models of a server: loaded by the first request, evicted when another model needs their memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from edge.devices.memory import memory_limit, memory_use, release_free_memory
from edge.devices.power import find_meter
from edge.documents.encoder import encoder_options
from edge.errors import BudgetError, InputError, UnsupportedError
from edge.model.adapters.lora import size_of
from edge.model.adapters.lora_file import Loras, parse_lora
from edge.model.structure.spec import ModelSpec
from edge.model.towers import AUDIO, VISION
from edge.options import NO_EYES, Options
from edge.prompt_cache.cache import PromptCache
from edge.records import dataclass
from edge.run.budgets.shares import EnergyLedger
from edge.run.report import RunReport
from edge.run.session import Session
from edge.run.speech.plan import own_options
from edge.run.starting.loading import open_session
from edge.run.starting.opening import open_model
from edge.run.starting.senses import senses_found
from edge.server.deadline import Deadline
from edge.server.ledger import Ledger
from edge.server.models.worker import Job, Turns, Worker
from edge.server.refusal import RefusedError
from edge.server.settings import Settings

SCORED_AT_ONCE = 8  # tokens of a prompt scored in one pass, each with a row of logits
_USEFUL_ROWS, _SCRATCH = 2048, 32 << 20  # assumed rows, and scratch bytes, of a model that is not loaded yet
_UNLOAD_S = 10.0  # for which an unload waits for the answers of others
_PROMPTS = 64 << 20  # least bytes for rows of earlier prompts, without a budget
_PROMPTS_OF_SPARE, _PROMPTS_OF_BUDGET = 8, 16  # their share is 1 / this of the memory to spare, or of the budget

_log = logging.getLogger("edge")


@dataclass(frozen=True)
class Entry:
    """A model that requests may name."""

    name: str
    path: str  # as `edge.load` takes it
    spec: ModelSpec
    aliases: tuple[str, ...]
    template: str | None  # of chats
    size: int  # bytes of the file
    created: int  # seconds since 1970, of the file
    identity: str  # differs for other files, and for a file that has changed
    adapters: dict[str, Loras]
    sees: bool = False  # whether there is an encoder of pictures for it, for which the last load had room
    hears: bool = False  # and one of sounds
    encodes: bool = False  # questions to documents: few of the server's options concern it


@dataclass(frozen=True)
class Lease:
    """A loaded model, which is not evicted until the lease is released."""

    entry: Entry
    worker: Worker
    session: Session
    lora: Loras


class Pool:
    """The models that a server offers. Raises InputError and other EdgeErrors for models that cannot be opened."""

    def __init__(
        self, models: Sequence[str], options: Options, settings: Settings, ledger: Ledger | None = None,
        on_end: Callable[[Job, RunReport | Exception], None] = lambda job, result: None,
    ) -> None:  # fmt: skip
        self.options, self.settings, self._on_end = options, settings, on_end
        self._lora = options.lora or ()  # adapters of all models, unless a request names others
        if options.chat_template is not None and len(models) > 1:
            raise InputError("--chat-template goes with one model: serve the others by another edge serve")
        if options.mmproj not in (None, NO_EYES) and len(models) > 1:
            raise InputError("--mmproj goes with one model: put the encoders of several beside their models")
        self.entries = {entry.name: entry for entry in (_entry(each, options) for each in models)}
        if len(self.entries) < len(models):
            raise InputError("two of the models have the same name")
        self._add_adapters(settings.adapters or ())
        self.ledger = ledger or Ledger(options.memory)
        self.workers: dict[str, Worker] = {}
        self.loads = self.evictions = 0
        self.energy = EnergyLedger(find_meter(), idle=True)
        self.shares = {name: self.energy.share(anew=True) for name in self.entries}  # of the joules, by model
        self._turns = Turns(self.energy)
        self._loading = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[Worker]] = {}

    def find(self, name: str | None) -> tuple[Entry, Loras]:
        """The model that a request names, and its adapters. Raises RefusedError."""
        if name is None or name == "":
            return next(iter(self.entries.values())), self._lora
        name = name.removesuffix(":latest")  # Ollama's clients append it
        for entry in self.entries.values():
            for known in (entry.name, *entry.aliases):
                if name == known:
                    return entry, self._lora
                adapter = name.removeprefix(f"{known}:")
                if adapter != name and adapter in entry.adapters:
                    return entry, entry.adapters[adapter]
        raise RefusedError(
            404,
            f"model {name[:80]!r} not found: choose from {', '.join(self.names())}",
            code="model_not_found",
            param="model",
        )

    def names(self) -> Iterator[str]:
        """The names of all models, each followed by those of its adapters."""
        for entry in self.entries.values():
            yield entry.name
            yield from (f"{entry.name}:{adapter}" for adapter in entry.adapters)

    async def acquire(self, name: str | None) -> Lease:
        """Lease a model, loading it if necessary. Raises RefusedError, and BudgetError for a model that never fits."""
        entry, lora = self.find(name)
        worker = self.workers.get(entry.name)
        if worker is not None and worker.failed:
            await self._evict(entry.name)
            worker = None
        if worker is None:
            try:
                async with Deadline(self.settings.most_wait):
                    worker = await asyncio.shield(self._coming(entry))
            except asyncio.TimeoutError:
                raise self.full(entry.name) from None
        worker.leases += 1
        try:
            session = await asyncio.wrap_future(worker.opened)
        except BaseException:
            worker.leases -= 1
            raise
        return Lease(entry, worker, session, lora)

    def release(self, lease: Lease) -> None:
        """End a lease: the model may be evicted when it has no other."""
        lease.worker.leases -= 1
        lease.worker.used = time.monotonic()

    def full(self, name: str) -> RefusedError:
        """The refusal of a request for which there is no room now."""
        waiting = sum(worker.queued + worker.running for worker in self.workers.values())
        pace = max((worker.seconds for worker in self.workers.values()), default=1.0)
        retry = int(min(60, max(1, waiting * pace)))
        return RefusedError(
            429, f"{name} is busy with other requests: try again in {retry} s", code="busy", retry=retry
        )

    async def close(self) -> None:
        """Unload all models."""
        for task in list(self._tasks.values()):
            task.cancel()
        for name in list(self.workers):
            await self._evict(name)

    def _coming(self, entry: Entry) -> asyncio.Task[Worker]:
        """The task that loads a model. It continues if the request that began it is cancelled."""
        task = self._tasks.get(entry.name)
        if task is None:
            task = self._tasks[entry.name] = asyncio.create_task(self._loaded(entry))
            task.add_done_callback(lambda _: self._tasks.pop(entry.name, None))
        return task

    async def _loaded(self, entry: Entry) -> Worker:
        async with self._loading:
            return self.workers.get(entry.name) or await self._load(entry)

    async def _load(self, entry: Entry) -> Worker:
        """Load a model, evicting the least recently used idle models until it fits."""
        while True:
            worker = Worker(
                entry.name, lambda: self._open(entry), self._turns, self.shares[entry.name], on_end=self._on_end,
                lora=self._lora,
            )  # fmt: skip
            try:
                await asyncio.wrap_future(worker.opened)
            except BudgetError:
                if not self.workers:
                    raise
                await self._make_room()
            else:
                self.workers[entry.name] = worker
                self.loads += 1
                return worker

    async def _make_room(self) -> None:
        """Evict the least recently used idle model; wait until one is idle."""
        while self.workers:
            idle = [worker for worker in self.workers.values() if worker.idle]
            if idle:
                await self._evict(min(idle, key=lambda worker: worker.used).name)
                return
            await asyncio.sleep(0.02)

    async def unload(self, name: str | None) -> None:
        """Unload a model, if it is loaded. Raises RefusedError if requests need it for longer than _UNLOAD_S."""
        entry, _ = self.find(name)
        try:
            async with Deadline(_UNLOAD_S):
                while (worker := self.workers.get(entry.name)) is not None and not worker.idle:
                    await asyncio.sleep(0.02)  # the connection of an answer that was read may still be closing
        except asyncio.TimeoutError:
            raise self.full(entry.name) from None
        if worker is not None:
            await self._evict(entry.name)

    async def _evict(self, name: str) -> None:
        worker = self.workers.pop(name)
        self.evictions += 1
        await asyncio.to_thread(worker.close)
        self.ledger.leave(name)
        release_free_memory()

    def _open(self, entry: Entry) -> Session:
        """Open the session of a model. Runs in the worker's thread."""
        options = self.options
        others = [each for each in self.entries.values() if each.name not in {entry.name, *self.ledger.models}]
        for_others = sum(map(self._least, others))
        if entry.spec.ears is not None:
            return self._open_few(entry, own_options(options))
        if entry.encodes:
            return self._open_few(entry, encoder_options(options))
        prompts = self.settings.prompt_memory or self._for_prompts(for_others + self._least(entry))
        prompts = prompts if self.settings.shares else 0
        cache = PromptCache(memory=prompts) if prompts else None
        loras = {self._lora, *entry.adapters.values()} - {()}
        largest = max(loras, key=lambda files: size_of(files).rank, default=None)
        options = replace(
            options, prompt_cache=cache, logits_rows=SCORED_AT_ONCE, lora=largest,
            loras=max(1, min(options.sequences, len(loras))),
        )  # fmt: skip
        meter = self.shares[entry.name]
        before = memory_use().rss
        try:
            session = open_session(entry.path, options, meter=meter, more=self.ledger.to_come + for_others)
        except BudgetError:
            if not others:
                raise
            session = open_session(entry.path, options, meter=meter, more=self.ledger.to_come)
        except UnsupportedError as error:
            if options.sequences == 1:
                raise
            options = replace(options, sequences=1)
            session = open_session(entry.path, options, meter=meter, more=self.ledger.to_come)
            _log.warning("%s answers one request at a time: %s", entry.name, str(error).split(": leave")[0])
        if largest not in (None, self._lora):
            session.set_lora(self._lora)
        self.entries[entry.name] = replace(
            entry, sees="picture" in session.model.senses, hears="sound" in session.model.senses
        )
        self.ledger.enter(entry.name, session.plan.bytes, before, prompts)
        return session

    def _open_few(self, entry: Entry, options: Options) -> Session:
        """Of a model that few of the server's options concern: these."""
        before = memory_use().rss
        session = open_session(entry.path, options, meter=self.shares[entry.name], more=self.ledger.to_come)
        self.ledger.enter(entry.name, session.plan.bytes, before, 0)
        return session

    def _for_prompts(self, needed: int) -> int:
        """Bytes for rows of earlier prompts. needed: by models that are not loaded yet. Generations return them under
        memory pressure (`edge/run/reclaim.py`)."""
        if self.options.memory is not None:
            return self.options.memory // _PROMPTS_OF_BUDGET
        spare = memory_limit().bytes - memory_use().rss - self.ledger.to_come - needed
        return max(_PROMPTS, spare // _PROMPTS_OF_SPARE)

    def _least(self, entry: Entry) -> int:
        """Approximate bytes that a model needs to be useful. Other models' plans leave them free, if they can."""
        spec, options = entry.spec, self.options
        rows = min(spec.context, options.max_kv_size or _USEFUL_ROWS)
        return spec.weight_bytes + options.sequences * (2 * rows * spec.kv_values_per_row + spec.state_bytes) + _SCRATCH

    def add_encoder(self, name: str, path: str) -> str:
        """Add the encoder of an index. Returns the name of its entry; a model that is there already serves."""
        made = _entry(path, Options())
        for entry in self.entries.values():
            if entry.identity == made.identity:
                return entry.name
        short = Path(name).stem if Path(name).exists() else name
        if short in self.entries:
            raise InputError(f"a model and the encoder of an index are both named {short}: rename the file")
        self.entries[short] = replace(made, name=short, aliases=(), encodes=True)
        self.shares[short] = self.energy.share(anew=True)
        return short

    def _add_adapters(self, stated: Sequence[str]) -> None:
        """Add the adapters of --adapter to their models. Raises InputError."""
        for each in stated:
            name, _, file = each.partition("=")
            base, _, adapter = name.rpartition("/")
            entry = self.entries.get(base) if base else next(iter(self.entries.values()))
            if not file or not adapter or entry is None or ":" in adapter:
                raise InputError(
                    f"--adapter {each}: write it like style=style.gguf, or {next(iter(self.entries))}/style=style.gguf"
                )
            entry.adapters[adapter] = parse_lora(file)


def _entry(model: str, options: Options) -> Entry:
    """Opens the file to check it, and closes it: it is opened again when the model is loaded."""
    opened = open_model(model).with_template(options.chat_template)
    path = Path(opened.path)
    status = path.stat()
    name = path.stem if path.exists() and str(path) == str(Path(model)) else str(model)
    aliases = tuple(dict.fromkeys(each for each in (opened.name, path.name, str(model)) if each != name))
    template = opened.file.metadata.get("tokenizer.chat_template")
    senses = senses_found(opened, options) if opened.template is not None else []
    return Entry(
        name, model, opened.spec, aliases, template if isinstance(template, str) else None,
        opened.spec.weight_bytes, int(status.st_mtime), f"{path.resolve()} {status.st_size} {status.st_mtime_ns}", {},
        VISION in senses, AUDIO in senses,
    )  # fmt: skip
