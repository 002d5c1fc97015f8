"""The tuned values of images compiled elsewhere: a note in the cache beside each image that was added.

A device without TVM runs only the images that it was given, whatever tuning records it has.
"""

from __future__ import annotations

import json
from typing import Any

from edge.backends.tuning import Values
from edge.backends.tvm.sources import PASS, source_hash
from edge.devices.keys import key_of
from edge.records import dataclass
from edge.storage import cache


@dataclass(frozen=True)
class Added:
    """The tuned values of an image."""

    about: str  # the record, as the compiling machine named it
    values: Values  # compiled in
    chunk: int | None  # None: left open


def note_added(model: str, shape: dict[str, Any], kv_dtype: str, isa: str, added: Added) -> None:
    """Note the values of an image for a model, by its label and sizes (`model_shape`). Raises CacheError."""
    with cache.create("kernels", _key(model, shape, kv_dtype, isa), ".json", f"tuning of {model}") as out:
        out.write_text(json.dumps(vars(added)), encoding="utf-8")


def find_added(model: str, shape: dict[str, Any], kv_dtype: str, isa: str) -> Added | None:
    """The values of the image added last, or None."""
    path = cache.find("kernels", _key(model, shape, kv_dtype, isa), ".json")
    try:
        return Added(**json.loads(path.read_text(encoding="utf-8"))) if path else None
    except (OSError, ValueError, TypeError):
        return None


def _key(*subject: object) -> str:
    return key_of(json.dumps([*subject, source_hash(*PASS)], sort_keys=True))
