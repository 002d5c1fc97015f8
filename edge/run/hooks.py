"""Functions that a caller gives to a generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edge.records import dataclass
from edge.run.arguments import check_function
from edge.run.report import RunReport, TokenLogprob

if TYPE_CHECKING:  # few runs have tools
    from edge.tools.parser import Event

OnPrefill = Callable[[int, int], None]  # tokens done, and tokens of the prompt as far as it is known
OnThought = Callable[[str], None]
OnLogprob = Callable[[TokenLogprob], None]
OnCall = Callable[["Event"], None]
OnPiece = Callable[[str], None]
OnEnd = Callable[[RunReport | Exception], None]


@dataclass(frozen=True)
class Hooks:
    """Callbacks of one generation, called between two passes: they must return quickly. Raises InputError for a
    callback that is no function."""

    prefill: OnPrefill | None = None  # after each pass of the prompt
    thought: OnThought | None = None  # each piece of thoughts
    logprob: OnLogprob | None = None  # each token, before its text
    call: OnCall | None = None  # parts of tool calls
    piece: OnPiece | None = None  # of a `Batch`: each piece of text
    end: OnEnd | None = None  # of a `Batch`: the report, or the error that ended the generation

    def __post_init__(self) -> None:
        for name, function in vars(self).items():
            check_function(f"on_{name}", function)


NO_HOOKS = Hooks()
