"""Ollama's endpoints about models: /api/tags, /api/ps, /api/show and embeddings, and those that change models, which
edge answers with a sentence."""

from __future__ import annotations

import datetime
import hashlib
import time
from dataclasses import field
from functools import partial
from typing import Any

from edge.model.adapters.lora_file import Loras
from edge.model.chat.thinking import find_family
from edge.records import dataclass
from edge.run.request import Request
from edge.server.events import Embedded, Event
from edge.server.hub import Hub, Work
from edge.server.models.pool import Entry
from edge.server.protocols import embeddings
from edge.server.protocols.fields import said
from edge.server.protocols.native import session_of
from edge.server.refusal import RefusedError

_FOREVER = datetime.timedelta(days=36500)  # Ollama's programs call that "Forever"
_UNCHANGED = "edge serve {what} no models: it offers those that it was started with"
UNCHANGED = {
    "/api/create": ("POST", "makes"),
    "/api/copy": ("POST", "copies"),
    "/api/delete": ("DELETE", "deletes"),
    "/api/push": ("POST", "uploads"),
}


@dataclass(frozen=True)
class ApiShowBody:
    """POST /api/show and /api/pull"""

    model: str | None = None
    name: str | None = said("The same, in older programs.")


@dataclass(frozen=True, kw_only=True)
class ApiEmbedBody:
    """POST /api/embed"""

    model: str | None = said("A name of /v1/models; the first model without it.")
    input: str | list[str] = field(default="", metadata={"help": "A text, or several."})
    truncate: bool | None = said("Leave out the end of a text that is too long (default: yes).")
    dimensions: embeddings.Dimensions | None = said("Return only the first values, scaled anew.")


@dataclass(frozen=True, kw_only=True)
class ApiEmbeddingsBody:
    """POST /api/embeddings"""

    model: str | None = said("A name of /v1/models; the first model without it.")
    prompt: str = field(default="", metadata={"help": "The text."})


def tags(hub: Hub) -> dict[str, Any]:
    """GET /api/tags"""
    return {"models": [_about(entry, name, loras) for entry in hub.pool.entries.values() for name, loras in _of(entry)]}


def running(hub: Hub) -> dict[str, Any]:
    """GET /api/ps: the models in memory."""
    found = []
    until = datetime.datetime.now(datetime.timezone.utc) + _FOREVER  # until another model needs the memory
    for entry in hub.pool.entries.values():
        if session := session_of(hub, entry):
            counted = session.plan.bytes
            size = counted.weights + counted.kv + counted.scratch + counted.lora + counted.snapshots + counted.draft
            found.append({
                **_about(entry, entry.name), "size": size, "size_vram": min(size, counted.gpu),
                "expires_at": _written(until), "context_length": session.plan.config.capacity,
            })  # fmt: skip
    return {"models": found}


def show(entry: Entry) -> dict[str, Any]:
    """POST /api/show"""
    spec = entry.spec
    info = {
        "general.architecture": spec.architecture,
        "general.parameter_count": spec.parameters,
        f"{spec.architecture}.context_length": spec.context,
        f"{spec.architecture}.embedding_length": spec.hidden,
    }
    about = _about(entry, entry.name)
    return {
        "template": entry.template or "", "model_info": info, "capabilities": _capabilities(entry),
        **{name: about[name] for name in ("modified_at", "digest", "details")},
    }  # fmt: skip


def pull(hub: Hub, name: str | None) -> dict[str, Any]:
    """POST /api/pull: a model that the server offers is there. Raises RefusedError for others."""
    hub.pool.find(name)
    return {"status": "success"}


def unchanged(path: str) -> RefusedError:
    """The answer to a request that would change the server's models."""
    return RefusedError(400, _UNCHANGED.format(what=UNCHANGED[path][1]), code="unsupported")


def translate(body: ApiEmbedBody | ApiEmbeddingsBody, headers: Any, tenant: str) -> list[Request]:
    """A request for each text, none if there is no text. Raises RefusedError."""
    given = body.prompt if isinstance(body, ApiEmbeddingsBody) else body.input
    texts = ([given] if given else []) if isinstance(given, str) else given
    if not all(texts):
        raise RefusedError(400, "a text of the input is empty", param="input", code="invalid_value")
    return embeddings.requests_of(texts, tenant)


def embeds(body: ApiEmbedBody | ApiEmbeddingsBody) -> Work:
    truncate, dimensions = getattr(body, "truncate", None) is not False, getattr(body, "dimensions", None)
    return partial(embeddings.embed, truncate=truncate, dimensions=dimensions)


async def no_embeddings(hub: Hub, name: str, body: ApiEmbedBody | ApiEmbeddingsBody) -> dict[str, Any]:
    """The response to a request without a text."""
    return EmbeddingWriter(name, body).whole([])


class EmbeddingWriter:
    """Writes the response to /api/embed or /api/embeddings."""

    def __init__(self, model: str, body: ApiEmbedBody | ApiEmbeddingsBody) -> None:
        self._model, self._body, self._began = model, body, time.perf_counter_ns()

    def whole(self, events: list[Event]) -> dict[str, Any]:
        found = sorted((each for each in events if isinstance(each, Embedded)), key=lambda each: each.choice)
        vectors = [embeddings.numbers(each.values) for each in found]
        if isinstance(self._body, ApiEmbeddingsBody):
            return {"embedding": vectors[0] if vectors else []}
        return {
            "model": self._model, "embeddings": vectors, "load_duration": 0,
            "total_duration": time.perf_counter_ns() - self._began,
            "prompt_eval_count": sum(each.tokens for each in found),
        }  # fmt: skip


def _of(entry: Entry) -> list[tuple[str, Loras]]:
    """The names of a model and its adapters, with the adapters' files."""
    return [(entry.name, ()), *((f"{entry.name}:{name}", files) for name, files in entry.adapters.items())]


def _about(entry: Entry, name: str, loras: Loras = ()) -> dict[str, Any]:
    spec = entry.spec
    details = {
        "parent_model": entry.name if loras else "", "format": "gguf", "family": spec.architecture,
        "families": [spec.architecture], "parameter_size": spec.label.split()[1],
        "quantization_level": spec.weight_type,
    }  # fmt: skip
    changed = datetime.datetime.fromtimestamp(entry.created, datetime.timezone.utc)
    return {
        "name": name, "model": name, "modified_at": _written(changed), "size": entry.size,
        "digest": _digest(entry, loras), "details": details,
    }  # fmt: skip


def _digest(entry: Entry, loras: Loras) -> str:
    """A digest that tells models apart, as programs expect it, of the files' identities: hashing their contents would
    take minutes on a memory card."""
    return "sha256:" + hashlib.sha256(repr((entry.identity, loras)).encode()).hexdigest()


def _capabilities(entry: Entry) -> list[str]:
    if entry.spec.encoder:
        return ["embedding"]
    if entry.spec.ears:
        return ["audio"]
    thinks = entry.template and find_family(entry.template)
    others = {"tools": entry.template, "thinking": thinks, "vision": entry.sees, "audio": entry.hears}
    return ["completion", *(name for name, has in others.items() if has)]


def _written(moment: datetime.datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
