"""Which of LongRoPE's two sets of factors a cache's rows are rotated by (arXiv:2402.13753).

A text within the original context has the short ones, a longer one has the long ones from its first token on, however
large the cache is: so does transformers. A text that grows beyond the original context has its keys rotated anew.
Deeper layers computed them, and their values, under the short factors, where transformers' `generate` runs the whole
text once more: such rows have a key of their own, and no other text takes them over.
"""

from __future__ import annotations

from edge.model.spec import Recipe


class LongRope:
    """The choice for one cache. `long`: the long factors apply. `suffix`: what the choice adds to `KVCache.key`."""

    def __init__(self, recipe: Recipe, positions: int) -> None:
        """positions: the most that the cache will have."""
        original = next((rope.original_context for rope in recipe.ropes if rope.has_long), positions)
        self._limit = original if positions > original else None
        self.clear()

    def clear(self) -> None:
        """The cache is empty: a new text begins."""
        self.long, self.suffix = False, ""

    def outgrown_by(self, positions: int) -> bool:
        """Whether a text of so many positions wants the long factors, where it had the short ones."""
        return self._limit is not None and not self.long and positions > self._limit

    def lengthen(self, rows: int) -> None:
        """The long factors from here on; rows: those in the cache, which are rotated anew."""
        self.long, self.suffix = True, ":lengthened" if rows else ":long"

    def adopt(self, key: str, own: str) -> None:
        """Choose what saved rows have that come back into an empty cache; own: the cache's key without suffix."""
        for suffix in ("", ":long", ":lengthened") if self._limit is not None else ():
            if key == own + suffix:
                self.long, self.suffix = bool(suffix), suffix
