"""Endpoints about the server and its models, like llama-server's: models, properties, health, metrics, tokens."""

from __future__ import annotations

import time
from typing import Any

from starlette.responses import Response

from edge.flags import flags_of
from edge.model.adapters.lora_file import LoraFile
from edge.run.session import Session
from edge.sampling import SamplingParams
from edge.server.http import Json, dumps
from edge.server.hub import Hub
from edge.server.ledger import Claim
from edge.server.models.pool import Entry
from edge.server.protocols.bodies import DetokenizeBody, TokenizeBody
from edge.server.refusal import RefusedError
from edge.storage.versions import edge_version

_HELP = {
    "prompt_tokens": "Tokens of prompts that were run.",
    "reused_tokens": "Tokens of prompts whose rows were reused.",
    "generated_tokens": "Tokens generated, thoughts included.",
    "evicted_rows": "KV rows evicted.",
    "answers": "Answers completed.",
    "cancelled": "Answers whose client went away.",
    "failed": "Answers that failed.",
}


def models(hub: Hub) -> dict[str, Any]:
    """GET /v1/models"""
    found = []
    for entry in hub.pool.entries.values():
        found.append(_model(hub, entry, entry.name))
        found += [_model(hub, entry, f"{entry.name}:{name}", files) for name, files in entry.adapters.items()]
    return {"object": "list", "data": found}


def _model(hub: Hub, entry: Entry, name: str, adapter: tuple[LoraFile, ...] = ()) -> dict[str, Any]:
    session = session_of(hub, entry)
    spec = entry.spec
    return {
        "id": name,
        "object": "model",
        "created": entry.created,
        "owned_by": "edge",
        "aliases": [] if adapter else list(entry.aliases),
        "loaded": session is not None,
        "parent": entry.name if adapter else None,
        "chat_template": bool(entry.template),
        "architecture": {
            "input_modalities": [
                *["text"][: not spec.ears], *["image"][: entry.sees], *["audio"][: entry.hears or bool(spec.ears)]
            ],
            "output_modalities": ["text"],
        },
        "meta": {
            "n_ctx": session.plan.config.capacity if session else spec.context, "n_ctx_train": spec.context,
            "n_vocab": spec.vocab, "n_embd": spec.hidden, "n_params": spec.parameters, "size": entry.size,
        },
    }  # fmt: skip


def session_of(hub: Hub, entry: Entry) -> Session | None:
    """The session of a model; None if the model is not loaded."""
    worker = hub.pool.workers.get(entry.name)
    return worker.opened.result() if worker is not None else None


def props(hub: Hub, entry: Entry) -> dict[str, Any]:
    """GET /props: the model's properties in llama-server's form, and the budgets and the memory of the process."""
    session, options = session_of(hub, entry), hub.pool.options
    n_ctx = session.plan.config.capacity if session else entry.spec.context
    params = {name: getattr(SamplingParams(), name) for name in flags_of(SamplingParams)}
    if session is not None:
        chosen = session.model.sampling()
        params = {name: getattr(chosen, name) for name in params}
    return {
        "default_generation_settings": {"n_ctx": n_ctx, "params": params},
        "total_slots": hub.pool.options.sequences,
        "model_alias": entry.name,
        "model_path": entry.path,
        "chat_template": entry.template or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"edge {edge_version()}",
        "edge": {
            "budgets": {
                "memory": options.memory, "time": options.time, "energy": options.energy, "power": options.power,
                "max_temp": options.max_temp,
            },
            "memory": hub.pool.ledger.figures(),
            "joules": hub.counts["microjoules"] / 1e6,
            "plan": session.plan.to_dict() if session else None,
        },
    }  # fmt: skip


def health(hub: Hub) -> Response:
    """GET /health"""
    if hub.draining:
        return Json({"status": "draining"}, 503)
    return Json({"status": "ok"})


def metrics(hub: Hub) -> Response:
    """GET /metrics: Prometheus' text format."""
    pool, lines = hub.pool, list[str]()

    def add(name: str, kind: str, help: str, *values: tuple[str, float]) -> None:
        lines.extend((f"# HELP edge_{name} {help}", f"# TYPE edge_{name} {kind}"))
        lines.extend(f"edge_{name}{labels} {value}" for labels, value in values)

    for name, help in _HELP.items():
        add(f"{name}_total", "counter", help, ("", hub.counts[name]))
    add("joules_total", "counter", "Joules of answers.", ("", hub.counts["microjoules"] / 1e6))
    pool.energy.read(anew=True)
    add("model_joules_total", "counter", "Joules of the passes of a model, by their time.",
        *((f'{{model="{name}"}}', round(share.joules, 6)) for name, share in pool.shares.items()))  # fmt: skip
    add("answer_seconds_total", "counter", "Seconds of answers.", ("", hub.counts["milliseconds"] / 1e3))
    responses = sorted(hub.responses.items())
    add("responses_total", "counter", "Responses by path and status.",
        *((f'{{path="{path}",status="{status}"}}', count) for (path, status), count in responses))  # fmt: skip
    add("queued", "gauge", "Answers that wait.", ("", hub.queued))
    add("running", "gauge", "Answers that are generated.", ("", sum(each.running for each in pool.workers.values())))
    add("models_loaded", "gauge", "Models in memory.", ("", len(pool.workers)))
    add("model_loads_total", "counter", "Models loaded so far.", ("", pool.loads))
    add("model_evictions_total", "counter", "Models unloaded so far.", ("", pool.evictions))
    teams = [(name, worker.opened.result().team) for name, worker in pool.workers.items()]
    add("passes_total", "counter", "Passes of a model by their threads: fewer where other programs wanted the cores.",
        *((f'{{model="{name}",threads="{threads}"}}', passes)
          for name, team in teams for threads, passes in enumerate(team, 1)))  # fmt: skip
    add("memory_bytes", "gauge", "Memory of the process by use.",
        *((f'{{use="{use}"}}', n) for use, n in pool.ledger.figures().items()))  # fmt: skip
    add("uptime_seconds", "gauge", "Seconds since the start.", ("", round(time.time() - hub.started, 1)))
    return Response("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4; charset=utf-8")


def tokenize(body: TokenizeBody, session: Session, claim: Claim) -> bytes:
    """POST /tokenize in llama-server's form, or, with `prompt`, in vLLM's."""
    tokenizer = session.model.tokenizer
    text, begins = body.content, body.add_special
    if text is None:
        text, begins = body.prompt, body.add_special_tokens is not False
    if text is None:
        raise RefusedError(400, "state the text as content", param="content", code="missing_required_parameter")

    def write(token: int) -> bytes:
        return dumps({"id": token, "piece": _piece(tokenizer.piece(token))}) if body.with_pieces else b"%d" % token

    first = [tokenizer.bos_id] if begins and tokenizer.add_bos and tokenizer.bos_id is not None else []
    parts = [write(each) for each in first]
    for block in tokenizer.encode_blocks(text, special=body.parse_special is not False):
        part = b",".join(map(write, block.tolist()))
        claim.add("answers", 2 * len(part))  # once more when all are joined
        parts.append(part)
    return b'{"tokens":[' + b",".join(filter(None, parts)) + b"]}"


def tokenizer_info(session: Session) -> dict[str, Any]:
    """GET /tokenizer_info in vLLM's form. lm-eval requests it."""
    tokenizer, template = session.model.tokenizer, session.model.file.metadata.get("tokenizer.chat_template")

    def text(token: int | None) -> str | None:
        return None if token is None else tokenizer.text(token)

    return {
        "tokenizer_class": "edge", "bos_token": text(tokenizer.bos_id), "eos_token": text(tokenizer.eos_id),
        "add_bos_token": tokenizer.add_bos, "chat_template": template if isinstance(template, str) else None,
    }  # fmt: skip


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def detokenize(body: DetokenizeBody, session: Session, claim: Claim) -> bytes:
    """POST /detokenize"""
    tokenizer = session.model.tokenizer
    if any(each >= tokenizer.size for each in body.tokens):
        why = f"token ids must be from 0 to {tokenizer.size - 1}, not {max(body.tokens)}"
        raise RefusedError(400, why, param="tokens", code="invalid_value")
    claim.add("answers", 4 * sum(len(tokenizer.piece(each)) for each in body.tokens))
    return dumps({"content": tokenizer.decode(body.tokens)})
