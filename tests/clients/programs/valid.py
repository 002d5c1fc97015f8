"""Lines of JSON on stdin, each the name of a type and a value; prints those whose value is not of the type."""

import importlib
import json
import sys
from functools import cache

from pydantic import TypeAdapter, ValidationError


@cache  # since making one takes longer than what it is for
def type_named(name):
    module, _, kind = name.rpartition(".")
    return TypeAdapter(getattr(importlib.import_module(module), kind))


wrong = []
for line in sys.stdin:
    name, value = json.loads(line)
    try:
        type_named(name).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        wrong.append(f"{name}: {error}")
print(json.dumps(wrong))
