"""KV policies by name, each in one file that reads like its paper."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from edge.errors import InputError

if TYPE_CHECKING:
    from edge.kv.policy import KVView, Needs, Policy, Scored

__all__ = [
    "DEFAULT_SINKS", "POLICY_HELP", "POLICY_NAMES", "KVView", "Needs", "Policy", "Scored", "make_policy", "own_policy",
    "pinned_rows",
]  # fmt: skip

_FAMILIES = {
    "": {"streaming": "StreamingLLM", "window": "Window", "full": "Full"},
    "by attention": {
        "h2o": "H2O", "tova": "TOVA", "scissorhands": "Scissorhands", "snapkv": "SnapKV", "pyramidkv": "PyramidKV",
        "adakv": "AdaKV", "fastgen": "FastGen",
    },
    "by keys": {"keydiff": "KeyDiff", "knorm": "KNorm", "kvzap": "KVzap"},
    "all, of which few are read,": {"quest": "Quest"},
}  # fmt: skip
"""Classes of the policies by what they go by, each in the module of its policy's name. A run imports only its own
policy: importing all takes 6 ms, and the command line, which lists them, does without NumPy."""
_POLICIES = {name: made for family in _FAMILIES.values() for name, made in family.items()}
POLICY_HELP = "; ".join(f"{family} {', '.join(names)}".strip() for family, names in _FAMILIES.items())
POLICY_NAMES = tuple(_POLICIES)
DEFAULT_SINKS = 4  # StreamingLLM's own figure


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'edge.kv' has no attribute {name!r}")
    return getattr(import_module("edge.kv.policy"), name)


class OwnPolicy(str):
    """The name of a caller's own policy, which stands for it in plans and reports, and the policy."""

    policy: Policy


def own_policy(policy: Any) -> OwnPolicy:
    """A policy of the caller's own as `make_policy` takes it. Raises InputError for other objects."""
    missing = [each for each in ("name", "evicts", "close_gaps", "needs", "rows_to_keep") if not hasattr(policy, each)]
    if missing or isinstance(policy, type):
        what = f"has no {missing[0]}" if missing else "is a class: give an object of it"
        raise InputError(f"--kv-policy takes a name, or a policy as edge.kv.Policy describes it: {policy!r:.60} {what}")
    if not isinstance(policy.name, str) or policy.name.partition(":")[0] in (*_POLICIES, "auto", ""):
        raise InputError(f"the name of a KV policy of your own must not be edge's, as {policy.name!r:.60} is")
    found = OwnPolicy(policy.name)
    found.policy = policy
    return found


def make_policy(text: str, sinks: int = DEFAULT_SINKS, keep: int = 0) -> Policy:
    """Create the policy that `NAME[:key=value,…]` describes. Raises InputError for unknown names, keys and values.

    sinks: first rows that are never evicted, unless the text states them; `window` has none. keep: rows to pin, such as
    a system prompt's; raises the sinks of every policy that evicts to at least this number, whatever the text says.
    """
    if keep < 0:
        raise InputError(f"--keep must be 0 or more, not {keep}")
    if isinstance(text, OwnPolicy):
        return _pinned(text.policy, keep)
    name, colon, rest = text.partition(":")
    if name not in _POLICIES:
        wrong = "KV policy auto has no options" if name == "auto" else f"unknown KV policy {name!r}"
        raise InputError(f"{wrong}: choose auto, {', '.join(_POLICIES)}")
    make: type[Any] = getattr(import_module(f"edge.kv.{name}"), _POLICIES[name])
    options = {each.name: int if each.type == "int" else float for each in fields(make) if name != "window"}
    chosen: dict[str, int | float] = {"sinks": sinks} if "sinks" in options else {}
    for pair in rest.split(",") if colon else ():
        key, _, value = pair.partition("=")
        if key not in options:
            known = f"choose {', '.join(options)}" if options else "it has none"
            raise InputError(f"KV policy {name} has no option {key!r}: {known}")
        try:
            chosen[key] = options[key](value)
        except ValueError:
            raise InputError(f"KV policy {name}: {key} must be a number, not {value!r}") from None
    return _pinned(make(**chosen), keep)


def _pinned(policy: Any, keep: int) -> Policy:
    """The policy with at least `keep` sinks, if it evicts."""
    if keep <= pinned_rows(policy) or not policy.evicts:
        return cast("Policy", policy)
    if not is_dataclass(policy) or "sinks" not in {each.name for each in fields(policy)}:
        raise InputError(f"--keep {keep}: the KV policy {policy.name} is no dataclass with a field `sinks`")
    return cast("Policy", replace(cast(Any, policy), sinks=keep))


def pinned_rows(policy: Policy) -> int:
    """The number of first rows that the policy never evicts; 0 if it evicts none."""
    return int(getattr(policy, "sinks", 0))
