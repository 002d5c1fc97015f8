"""What is done with every cell: each task reads its texts in a session of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edge.quality.cells import FULL, Cache, Cell, Setup, cache_of, open_cell
from edge.quality.journal import Figures
from edge.quality.perplexity import Advance, stream_documents
from edge.quality.repeat import measure_repeats
from edge.quality.retrieval import Retrieved, Trial, recall_compressed, recall_streamed
from edge.types import IntArray

_READ_CHUNK = 256  # tokens that run at once where nothing is evicted before all of them are in


@dataclass(frozen=True)
class Material:
    """What is read, in tokens. A task without any is left out."""

    documents: Sequence[IntArray] = ()
    repeats: Sequence[IntArray] = ()
    trials: Sequence[Trial] = ()

    def tokens(self, task: str) -> int:
        """How many the task runs in a cell."""
        if task == "retrieval":
            return 3 * sum(trial.tokens for trial in self.trials)  # one for each protocol
        return sum(text.size - 1 for text in (self.documents if task == "perplexity" else self.repeats))

    @property
    def longest(self) -> int:
        """Tokens of the longest text: all tasks expect as many, so that a cell's cache is the same in all of them."""
        texts = [text.size - 1 for text in (*self.documents, *self.repeats)]
        return max([*texts, *(trial.tokens for trial in self.trials)])


def _perplexity(setup: Setup, cell: Cell, material: Material, advance: Advance) -> tuple[Cache, Figures]:
    with open_cell(setup, cell, material.longest) as session:
        return cache_of(session), stream_documents(session, material.documents, advance)


def _repeat(setup: Setup, cell: Cell, material: Material, advance: Advance) -> tuple[Cache, Figures]:
    with open_cell(setup, cell, material.longest) as session:
        return cache_of(session), measure_repeats(session, material.repeats, advance)


def _retrieval(setup: Setup, cell: Cell, material: Material, advance: Advance) -> tuple[Cache, Figures]:
    """First in the cell's own cache, then with one compression to as many rows, in a cache with room for all."""
    trials, longest = material.trials, max(trial.tokens for trial in material.trials)
    with open_cell(setup, cell, material.longest) as session:
        cache = cache_of(session)
        streamed = recall_streamed(session, trials, advance)
    roomy = replace(cell, policy=cache.policy, kv_dtype=cache.kv_dtype, kv_memory=None, max_kv_size=longest)
    rows = longest if cell.policy == FULL else cache.rows
    with open_cell(replace(setup, chunk=min(_READ_CHUNK, longest)), roomy, longest) as session:
        once = recall_compressed(session, trials, rows, advance)
    digits, depths = [len(trial.key) for trial in trials], [trial.depth for trial in trials]
    return cache, Retrieved(digits, depths, once.known, once.later, streamed)


TASKS: dict[str, Callable[[Setup, Cell, Material, Advance], tuple[Cache, Figures]]] = {
    "perplexity": _perplexity,
    "retrieval": _retrieval,
    "repeat": _repeat,
}
