"""The softmax attention core, over cached and new rows."""

from __future__ import annotations

from coremltools.converters.mil.mil import Builder as mb  # noqa: N813

from edge.converters.coreml.context import Context, Value, mask_name, scaled, soft_cap, table_names
from edge.model.cores import Attention


def attention(function: Context, core: Attention, layer: int, x: Value) -> Value:
    """Map normalized rows, [1, n, hidden], to the concatenated heads' outputs, [1, n, width].

    Appends the new keys and values, [1, KV heads, n, head], to `function.kept`.
    """
    at, n, head = f"blk.{layer}.", function.tokens, core.head_dim
    sizes = [core.heads, core.kv_heads, core.kv_heads]
    parts = mb.split(x=function.multiply(f"{at}qkv", x), split_sizes=[size * head for size in sizes], axis=-1)
    q, k, v = (mb.reshape(x=part, shape=[1, n, size, head]) for part, size in zip(parts, sizes, strict=True))
    if core.head_norms:
        q, k = function.norm(q, f"{at}attn_q_norm"), function.norm(k, f"{at}attn_k_norm")
    if core.temperature:
        q = mb.mul(x=q, y=mb.expand_dims(x=function.inputs["temperatures"], axes=[3]))
    q, k, v = (mb.transpose(x=part, perm=[0, 2, 1, 3]) for part in (q, k, v))
    q, k = _rotate(function, layer, scaled(q, core.scale)), _rotate(function, layer, k)
    function.kept += [mb.identity(x=k, name=f"key_{layer}"), mb.identity(x=v, name=f"value_{layer}")]
    q = mb.reshape(x=q, shape=[1, core.kv_heads, core.heads // core.kv_heads * n, head])
    # Scores and mixtures are joined rather than the rows, which are many more.
    cached = mb.matmul(x=q, y=function.inputs[f"past_key_{layer}"], transpose_y=True)
    scores = mb.concat(values=[cached, mb.matmul(x=q, y=k, transpose_y=True)], axis=-1)
    mask = function.masks[mask_name(core.window)]
    shares = mb.softmax(x=mb.add(x=soft_cap(scores, core.score_cap), y=mask), axis=-1)
    of_cached, of_new = mb.split(x=shares, split_sizes=[function.rows, n], axis=-1)
    mixed = mb.matmul(x=of_cached, y=function.inputs[f"past_value_{layer}"])
    mixed = mb.add(x=mixed, y=mb.matmul(x=of_new, y=v))
    mixed = mb.transpose(x=mb.reshape(x=mixed, shape=[1, core.heads, n, head]), perm=[0, 2, 1, 3])
    return mb.reshape(x=mixed, shape=[1, n, core.width])


def _rotate(function: Context, layer: int, x: Value) -> Value:
    """Apply RoPE to x [1, heads, n, head], pairing value i with value i + head / 2."""
    if not function.network.rotates(layer):
        return x
    cos, sin = (function.angles[name] for name in table_names(function.network.rope_of(layer)))
    one, other = mb.split(x=x, num_splits=2, axis=-1)
    first = mb.sub(x=mb.mul(x=one, y=cos), y=mb.mul(x=other, y=sin))
    second = mb.add(x=mb.mul(x=one, y=sin), y=mb.mul(x=other, y=cos))
    return mb.concat(values=[first, second], axis=-1)
