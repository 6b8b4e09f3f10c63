"""How much of what a model computes goes through each of its layers, MLP neurons, key/value groups
and hidden dimensions: what a student keeps of its teacher. Measured by forward passes alone.

Letters: B rows, T positions, N = B·T, D hidden, L layers, F MLP width, H query heads, G key/value
groups, R = H/G, Q head dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_distill.base.console import progress
from jax_distill.base.errors import UserError
from jax_distill.batch import Batch
from jax_distill.cache import Cache
from jax_distill.losses import Head, full_token_values
from jax_distill.model import Decoder, LayerInputs
from jax_distill.model.layers import Layer
from jax_distill.objective import Execution

Sums = dict[str, jax.Array]


def _turned(before: jax.Array, after: jax.Array, real: jax.Array) -> jax.Array:
    """Σ over the real tokens of 1 − cos(before, after): [B,T,D] twice, bool [B,T] → fp32."""
    before, after = before.astype(jnp.float32), after.astype(jnp.float32)
    norms = jnp.linalg.norm(before, axis=-1) * jnp.linalg.norm(after, axis=-1)
    cosine = jnp.sum(before * after, axis=-1) / jnp.maximum(norms, 1e-30)
    return jnp.sum(jnp.where(real, 1.0 - cosine, 0.0))


@jax.jit
def _cosine_sums(model: Decoder, batch: Batch) -> Sums:
    """fp32 [L]: `_turned` of each layer's input and output."""
    every = tuple(range(model.config.num_hidden_layers))
    real = batch.segment_ids > 0
    after = model.apply(
        batch.tokens, batch.segment_ids, batch.positions, hidden_layers=every
    ).layers
    before = jnp.concatenate([model.embed(batch.tokens).reshape(1, *after.shape[1:]), after[:-1]])
    return {"layers": jax.vmap(partial(_turned, real=real))(before, after), "count": real.sum()}


@partial(jax.jit, static_argnames=("vocab_size", "chunk_size"))
def _kl_sums(model: Decoder, batch: Batch, *, vocab_size: int, chunk_size: int) -> Sums:
    """fp32 [L]: Σ over the valid tokens of KL(model ‖ model without that layer), nats. Each starts
    from the input that the layer left out had in the whole model."""
    depth, (rows, _) = model.config.num_hidden_layers, batch.tokens.shape
    inputs = model.layer_inputs(batch.segment_ids, batch.positions)
    layer, stacked = model.layer_function()
    head = Head(model.lm_head_weight(), vocab_size=vocab_size)
    execution = Execution(chunk_size=chunk_size)

    def step(x: jax.Array, turn: tuple[jax.Array, nnx.State]) -> tuple[jax.Array, jax.Array]:
        kind, weights = turn
        return layer(x, weights, inputs._replace(kind=kind))[0], x

    whole, before = jax.lax.scan(step, model.embed(batch.tokens), (inputs.kind, stacked))

    def hidden(x: jax.Array) -> jax.Array:
        return model.output(x, x[:0], (), rows=rows).hidden

    def rise(left_out: jax.Array) -> jax.Array:
        def later(number: jax.Array, x: jax.Array) -> jax.Array:
            kind, weights = jax.tree.map(lambda leaf: leaf[number], (inputs.kind, stacked))
            return step(x, (kind, weights))[0]

        x = jax.lax.fori_loop(left_out + 1, depth, later, before[left_out])
        student = {"": (hidden(x), head)}
        found = full_token_values(
            hidden(whole), head, student, batch.labels, batch.mask, execution=execution
        )
        return jnp.sum(found[""].kl)

    return {"layers": jax.lax.map(rise, jnp.arange(depth)), "count": jnp.sum(batch.mask)}


@jax.jit
def _width_sums(model: Decoder, batch: Batch) -> Sums:
    """Sums over the real tokens of squares, fp32: see `Widths`. hidden [2L+1,D]."""
    config = model.config
    real = (batch.segment_ids > 0).reshape(-1)
    inputs = model.layer_inputs(batch.segment_ids, batch.positions)
    graphdef, stacked = nnx.split(model.layers)

    def squares(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(real[:, None], jnp.square(x.astype(jnp.float32)), 0.0), axis=0)

    def step(x: jax.Array, turn: tuple[jax.Array, nnx.State]) -> tuple[jax.Array, Sums]:
        kind, weights = turn
        layer: Layer = nnx.merge(graphdef, weights)
        here = inputs._replace(kind=kind)
        sums, x = _layer_squares(layer, x, here, squares, groups=config.num_key_value_heads)
        return x, sums

    x, sums = jax.lax.scan(step, model.embed(batch.tokens), (inputs.kind, stacked))
    by_norm = sums.pop("hidden").reshape(-1, config.hidden_size)
    sums["hidden"] = jnp.concatenate([by_norm, squares(model.norm(x))[None]])
    return {**sums, "count": real.sum()}


def _layer_squares(
    layer: Layer,
    x: jax.Array,
    inputs: LayerInputs,
    squares: Callable[[jax.Array], jax.Array],
    *,
    groups: int,
) -> tuple[Sums, jax.Array]:
    """One layer's sums, and its output; x [N,D]."""
    normed = layer.input_layernorm(x)
    heads = layer.self_attn.mixed(normed, inputs)
    attended = layer.self_attn.o_proj(heads)
    inner = layer.post_attention_layernorm(x + attended)
    sums = {"hidden": jnp.stack([squares(normed), squares(inner)])}
    # ‖W h‖² of each group's part of o_proj is hᵀ(WᵀW)h: no [N,G,D].
    part = layer.self_attn.o_proj.weight[...].astype(jnp.float32)
    part = part.reshape(part.shape[0], groups, -1)
    gram = jnp.einsum("dgi,dgj->gij", part, part)
    split = heads.astype(jnp.float32).reshape(heads.shape[0], groups, -1)
    lengths = jnp.einsum("ngi,gij,ngj->ng", split, gram, split)
    sums["kv_groups"] = squares(jnp.sqrt(jnp.maximum(lengths, 0.0)))
    if not hasattr(layer.mlp, "experts"):
        down = layer.mlp.down_proj.weight[...].astype(jnp.float32)
        sums["neurons"] = squares(layer.mlp.neurons(inner)) * jnp.sum(down * down, axis=0)
    return sums, layer.after_attention(x, attended, inputs.masks[0].segment_ids)[0]


class Widths(NamedTuple):
    """Root mean squares over the tokens, float64.

    Attributes:
        neurons: [L,F], the length of what each MLP neuron adds to the hidden states: |activation| ·
            ‖its column of down_proj‖; None for experts.
        kv_groups: [L,G], the length of what the query heads of each key/value group add together.
        hidden: [2L+1,D], each hidden dimension after each norm (input and post-attention of every
            layer, then the final one), the norm's weight included.
    """

    neurons: np.ndarray | None
    kv_groups: np.ndarray
    hidden: np.ndarray


def layer_importance(
    model: Decoder, cache: Cache, rows: np.ndarray, *, by: str = "cosine", chunk_size: int = 1024
) -> np.ndarray:
    """float64 [L]: how much each layer does for the tokens of `rows`.

    by: "cosine", the mean over all tokens of 1 − cos(input, output), the Block Influence of
    ShortGPT (Men et al. 2024, arXiv 2403.03853, eq. 1): one pass; it takes L·T·D numbers twice.
    "kl", the mean over the valid ones of KL(model ‖ model without the layer), nats, over the whole
    vocabulary at τ = 1, `chunk_size` positions at a time: L/2 passes, and the head L times.

    Raises:
        UserError: the rows hold no token; the model has not all of their ids.
    """
    if by == "kl":
        words = {"vocab_size": cache.manifest.vocab_size, "chunk_size": chunk_size}
        return _means(partial(_kl_sums, **words), model, cache, rows)["layers"]
    return _means(_cosine_sums, model, cache, rows)["layers"]


def width_importance(model: Decoder, cache: Cache, rows: np.ndarray) -> Widths:
    """What goes through the model's neurons, heads and dimensions, on all tokens of `rows`: the
    activation importance of Minitron (Muralidharan et al. 2024, arXiv 2407.14679, eq. 1), as root
    mean squares, and of neurons and heads with the weights by which they act. Raises as
    `layer_importance` does."""
    means = _means(_width_sums, model, cache, rows)
    found = {name: np.sqrt(value) for name, value in means.items()}
    return Widths(found.get("neurons"), found["kv_groups"], found["hidden"])


def _means(
    sums: Callable[[Decoder, Batch], Sums], model: Decoder, cache: Cache, rows: np.ndarray
) -> dict[str, np.ndarray]:
    """Σ over the rows, one at a time, ÷ Σ of their `count`; float64."""
    if cache.largest_token >= model.config.vocab_size:
        raise UserError(
            f"expected ids below {model.config.vocab_size}, the teacher's, in the cache at "
            f"{cache.path}, got {cache.largest_token}; name a cache of this teacher's tokenizer"
        )
    total: dict[str, Any] = {}
    for row in progress(rows, "importance", total=len(rows)):
        found = sums(model, cache.read([row], targets=False))
        total = {name: total.get(name, 0.0) + np.float64(value) for name, value in found.items()}
    count = total.pop("count")
    if not count:
        raise UserError(
            f"expected text in the first {len(rows)} rows of {cache.path}, got padding; "
            "name another cache"
        )
    return {name: value / count for name, value in total.items()}


def most_important(importance: np.ndarray, count: int) -> list[int]:
    """The `count` of largest importance (of equals the first), rising; importance [n]."""
    return sorted(np.argsort(-importance, kind="stable")[:count].tolist())
