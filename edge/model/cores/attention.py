"""Attention, with keys and values of its own, of another layer, or latent."""

from __future__ import annotations

from collections.abc import Iterator

from edge.model.cores.parts import UNROTATED, Rope, RowShape, Temperature, Tensor, bounds, with_biases
from edge.records import dataclass


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) in its absorbed form.

    `attn_kv_a_mqa` · x is a latent vector c, which `attn_kv_a_norm` normalises, and a key k with a position. All heads
    read one row, the key [c, RoPE(k)] and the value c. A head's query is [q, p]: q has no position and is multiplied by
    the head's `attn_k_b`, p is rotated. What a head mixes from the values is multiplied by its `attn_v_b` and, if
    `gated`, by the sigmoid of its value of `attn_gate` · x.
    """

    plain: int  # values of q
    value: int  # that a head hands to the output projection
    rank: int = 0  # queries are `attn_q_b` · norm(`attn_q_a` · x), through this many values; 0: `attn_q` · x
    joined: bool = False  # files have `attn_k_b`, transposed, and `attn_v_b` in one matrix, `attn_kv_b`, head by head
    gated: bool = False


@dataclass(frozen=True)
class Attention:
    """Softmax attention. State: a row of keys and values for each token, or for each of the last `window` tokens.

    `attn_q`, `attn_k`, `attn_v` project the normalised rows to heads; a group of query heads shares a KV head. With
    `rows_of`, the layer has queries only, which read the rows of an earlier layer with KV heads of the same sizes; so
    has one `across`, whose `attn_k` and `attn_v` project states of an encoder (`CrossEngine`), the same for all tokens.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of queries
    rope: Rope = UNROTATED

    # The tokens that a token attends to.
    window: int = 0  # positions: its own is the last, or the middle in encoders; 0: all
    causal: bool = True  # those before it; False: all of its text
    spans: bool = True  # within a picture that sees all of itself (`Places.sees`), all of it

    # Their rows.
    rows_of: int | None = None  # the layer whose rows are read; None: this one's
    across: bool = False  # cross attention
    value_dim: int = 0  # of a value; 0: head_dim
    shared_values: bool = False  # a value is the beginning of its key, and there is no `attn_v`
    unit_values: bool = False  # each head's values are divided by their root mean square
    latent: Latent | None = None  # `kv_heads` is 1, `head_dim` the size of a row's key, `value_dim` of its value

    # Scores.
    score_cap: float = 0.0  # scores become cap · tanh(score / cap); 0: no cap
    temperature: Temperature | None = None
    sinks: bool = False  # softmax sees one more score in each head, `attn_sinks`, whose share is dropped

    # Matrices and norms.
    biases: tuple[str, ...] = ()  # the matrices that have one
    head_norms: bool = False  # of each head's queries and keys, before RoPE
    gated: bool = False  # the output is multiplied by the sigmoid of `attn_q_gate` · x
    keys_as_values: bool = False  # files have no `attn_v`, which is `attn_k`: values differ by norm and RoPE only
    clipped: bool = False  # matrices have bounds (see `BOUNDS`)
    joined: bool = False  # they multiply the rows that `Features` has joined, [n, 2 · hidden]

    output = "attn_output"
    fixed_values = 0

    @property
    def inputs(self) -> tuple[str, ...]:
        """Matrices that multiply the normalised rows."""
        if self.latent:
            gate = ("attn_gate",) if self.latent.gated else ()
            return ("attn_q_a" if self.latent.rank else "attn_q", "attn_kv_a_mqa", *gate)
        own = ("attn_k", "attn_v")[: 2 - self.shared_values] if self.makes_rows else ()
        return ("attn_q", *own, *(("attn_q_gate",) if self.gated else ()))

    @property
    def crossing(self) -> tuple[str, ...]:
        """Matrices that multiply an encoder's states."""
        return ("attn_k", "attn_v") if self.across else ()

    @property
    def makes_rows(self) -> bool:
        """Whether its layer adds rows to the KV cache."""
        return self.rows_of is None and not self.across

    def source(self, layer: int) -> int:
        """The layer whose rows it reads as the core of `layer`."""
        return layer if self.rows_of is None else self.rows_of

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def queries(self) -> int:
        """Values of all heads' queries."""
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Values that all heads mix from the rows' values."""
        return self.heads * self.row.value

    @property
    def width(self) -> int:
        """Values that the core hands to its output projection."""
        return self.heads * self.latent.value if self.latent else self.mixed

    @property
    def widest(self) -> int:
        """The length of the longest row that a matrix of the core multiplies, besides the normalised rows."""
        return max(self.mixed, self.width, self.heads * self.latent.plain if self.latent else 0)

    @property
    def row(self) -> RowShape:
        """The rows that it reads."""
        value, rotated = self.value_dim or self.head_dim, (self.rope.first, self.rope.dim)
        return RowShape(self.kv_heads, self.head_dim, value, rotated, self.shared_values)

    @property
    def rotated(self) -> int:
        """Latent: values of a row behind the latent vector, which are rotated."""
        return self.row.key - self.row.value

    @property
    def query(self) -> int:
        """Latent: values of a head's query before `attn_k_b`."""
        assert self.latent
        return self.latent.plain + self.rotated

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        if self.latent:
            yield from self._latent_tensors(self.latent, hidden)
            return
        row = self.row
        rows = {
            "attn_q": self.queries, "attn_k": row.heads * row.key, "attn_v": row.heads * row.value,
            "attn_q_gate": self.width,
        }  # fmt: skip
        same, columns = {"attn_v": "attn_k"} if self.keys_as_values else {}, hidden * (1 + self.joined)
        matrices = (
            Tensor(name, rows[name], columns, same_as=same.get(name, "")) for name in (*self.inputs, *self.crossing)
        )
        yield from with_biases(matrices, self.biases)
        for name in ("attn_q", "attn_k") if self.head_norms else ():
            if name in self.inputs:
                yield Tensor(f"{name}_norm", self.head_dim)
        if self.sinks:
            yield Tensor("attn_sinks", self.heads)
        yield from with_biases([Tensor(self.output, hidden, self.width)], self.biases)
        yield from bounds((*self.inputs, self.output)) if self.clipped else ()

    def _latent_tensors(self, latent: Latent, hidden: int) -> Iterator[Tensor]:
        row, heads = self.row, self.heads
        queries = heads * self.query
        if latent.rank:
            yield Tensor("attn_q_a", latent.rank, hidden)
            yield Tensor("attn_q_a_norm", latent.rank)
            yield Tensor("attn_q_b", queries, latent.rank)
        else:
            yield Tensor("attn_q", queries, hidden)
        yield Tensor("attn_kv_a_mqa", row.key, hidden)
        yield Tensor("attn_kv_a_norm", row.value)
        if latent.gated:
            yield Tensor("attn_gate", heads, hidden)
        both = (row.value, heads * (latent.plain + latent.value)) if latent.joined else ()
        yield Tensor("attn_k_b", heads * row.value, latent.plain, stored=both or (latent.plain, row.value, heads))
        yield Tensor("attn_v_b", self.width, row.value, stored=both or (row.value, latent.value, heads))
        yield Tensor(self.output, hidden, self.width)
