"""GET /openapi.json: the server's endpoints, from the fields that also check requests."""

from __future__ import annotations

import types
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from edge.flags import flags_of
from edge.sampling import SamplingParams
from edge.server.protocols.anthropic import MessagesBody
from edge.server.protocols.bodies import DetokenizeBody, TokenizeBody
from edge.server.protocols.fields import Range
from edge.server.protocols.ollama_models import ApiShowBody
from edge.server.protocols.table import ENDPOINTS
from edge.storage.versions import edge_version

BODIES: dict[str, type] = {
    **{each.paths[0]: each.body for each in ENDPOINTS},
    "/v1/messages/count_tokens": MessagesBody,
    "/api/show": ApiShowBody,
    "/api/pull": ApiShowBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_FORMS = {path: "multipart/form-data" for each in ENDPOINTS if each.form for path in each.paths}
GETS = {
    "/v1/models": "The models that requests may name.",
    "/health": "Whether requests are answered.",
    "/props": "Properties of a model, budgets and memory.",
    "/tokenizer_info": "The tokens that begin and end a model's texts, and its chat template.",
    "/api/tags": "The models, in Ollama's form.",
    "/api/ps": "The models in memory.",
    "/api/version": "The version of Ollama's protocol.",
}
_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"}, int: {"type": "integer"}, float: {"type": "number"}, bool: {"type": "boolean"}, Any: {},
    bytes: {"type": "string", "format": "binary"},
}  # fmt: skip
_REFUSALS = {
    "400": "The request is wrong.", "401": "The key is missing or wrong.", "403": "The caller may not ask.",
    "404": "There is no such model.", "413": "The request is too large.", "415": "The content is no JSON.",
    "422": "A budget does not suffice.", "429": "There is no room now.", "503": "The server is shutting down.",
}  # fmt: skip


@cache
def describe() -> dict[str, Any]:
    """The description of the server, in OpenAPI 3.1."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for path, kind in BODIES.items():
        content = {_FORMS.get(path, "application/json"): {"schema": _schema(kind, schemas)}}
        paths[path] = {"post": {"requestBody": {"required": True, "content": content}, "responses": _responses(path)}}
    for path, summary in GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses(path)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "edge serve", "version": edge_version()},
        "paths": paths,
        "components": {"schemas": schemas},
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}  # fmt: skip


def _responses(path: str) -> dict[str, Any]:
    others = path.startswith("/api/") or path.startswith("/v1/messages")
    error = {"type": "object"} if others else {"$ref": "#/components/schemas/Error"}
    refusals = {
        status: {"description": words, "content": {"application/json": {"schema": error}}}
        for status, words in _REFUSALS.items()
    }
    content: dict[str, Any] = {kind: {} for kind in ("application/json", "text/event-stream", "application/x-ndjson")}
    return {"200": {"description": "The answer, whole or in pieces.", "content": content}, **refusals}


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if kind is type(None):
        return {"type": "null"}
    if origin is Annotated:
        ranges = [each for each in arguments[1:] if isinstance(each, Range)]
        limits = {"minimum": ranges[0].low, "maximum": ranges[0].high} if ranges else {}
        return {**_schema(arguments[0], schemas), **limits}
    if origin in (types.UnionType, Union):
        return {"anyOf": [_schema(each, schemas) for each in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0], schemas)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], schemas)}
    name = kind.__name__  # of a dataclass
    if name not in schemas:
        schemas[name] = {}  # a placeholder: the type may refer to itself
        schemas[name] = _object(kind, schemas)
    return {"$ref": f"#/components/schemas/{name}"}


def _object(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    hints, flags, properties, required = get_type_hints(kind, include_extras=True), flags_of(SamplingParams), {}, []
    for each in fields(kind):
        found = _schema(hints[each.name], schemas)
        if help := each.metadata.get("help"):
            found["description"] = help
        elif each.name in flags:
            flag = flags[each.name]
            found["description"] = flag.help
            for option in found.get("anyOf", ()):
                if option.get("type") in ("number", "integer") and flag.high != float("inf"):
                    option |= {"minimum": flag.low, "maximum": flag.high}
        properties[each.name] = found
        if each.default is MISSING and each.default_factory is MISSING:
            required.append(each.name)
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}
