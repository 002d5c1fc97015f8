"""Values of options that need no validation, for which typer would import pydantic: a tenth of the start."""

from __future__ import annotations

from functools import partial
from typing import Any

_MOST_DIGITS = 18  # of a number that fits 64 bits


def spared(param: Any) -> Any:
    """The parameter: values of its own type and numbers of digits alone pass, typer validates all others."""
    # Earlier versions of typer validate by click, without a descriptor and at no such cost.
    descriptor = getattr(param, "type_descriptor", None)
    if descriptor is not None and descriptor.parameter_info.parser is None and "process_value" not in vars(param):
        param.process_value = partial(_process, param, param.process_value)
    return param


def _process(param: Any, validated: Any, context: Any, value: Any) -> Any:
    kind, info = param.type_descriptor.annotation, param.type_descriptor.parameter_info
    if value is None and not param.required:
        value = () if param.multiple or param.nargs == -1 else None
    elif kind == list[str] and isinstance(value, (list, tuple)) and value and all(type(each) is str for each in value):
        pass
    elif info.min is None and info.max is None and kind is int and _is_digits(value):
        value = int(value)
    elif type(value) is not kind or kind not in (bool, int, float, str) or not (info.min is info.max is None):
        return validated(context, value)
    return value if param.callback is None else param.callback(context, param, value)


def _is_digits(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS
