"""One optimizer step: pure functions from state and batch to state and numbers.

`train.py` runs it, `plan.py` and `bench` look at it from outside. B rows, T positions, A
micro-batches.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jax_distill import losses, sharding
from jax_distill.config import LossConfig, Refusal
from jax_distill.layerwise import Part, backward, moved_counters
from jax_distill.model import Decoder, ModelConfig
from jax_distill.optimizer import apply_updates


class TrainState(NamedTuple):
    """All that a step changes. `step` counts finished optimizer steps."""

    params: Any
    opt_state: Any
    step: jax.Array


def batch_sums(
    model: Decoder,
    hidden: jax.Array,
    batch: dict[str, jax.Array],
    *,
    loss: LossConfig,
    vocab_size: int,
) -> losses.LossSums:
    """The loss of hidden states [B,T,D] against a batch [B,T], and the sums it is made of.
    vocab_size: the columns that are real; what the head has beyond is padding."""
    return losses.IMPLEMENTATIONS[loss.implementation](
        hidden,
        model.lm_head_weight(),
        batch["labels"],
        batch["mask"],
        batch.get("teacher_indices"),
        batch.get("teacher_logprobs"),
        batch.get("teacher_log_tail"),
        batch.get("teacher_count"),
        vocab_size=vocab_size,
        tail=loss.tail,
        divergence=loss.divergence,
        jsd_beta=loss.jsd_beta,
        temperature=loss.temperature,
        chunk_size=loss.chunk_size,
        kl_weight=loss.kl_weight,
        ce_weight=loss.ce_weight,
        z_loss_weight=loss.z_loss_weight,
        valid_first=loss.valid_first,
    )


def loss_fn(
    params: Any, graphdef: Any, batch: dict[str, jax.Array], *, loss: LossConfig, vocab_size: int
) -> tuple[jax.Array, losses.LossSums]:
    """Summed loss of a batch [B,T], and the sums it is made of; see `batch_sums`."""
    model = nnx.merge(graphdef, params)
    hidden = model.hidden_states(batch["tokens"], batch["segment_ids"], batch["positions"])
    sums = batch_sums(model, hidden, batch, loss=loss, vocab_size=vocab_size)
    return sums.loss, sums


def means(sums: losses.LossSums) -> dict[str, jax.Array]:
    """Sums over tokens → means per valid token (0 where there is none), and the count itself."""
    count = jnp.maximum(sums.count, 1.0)
    values = {k: v / count for k, v in sums._asdict().items() if k != "count"}
    return {**values, "valid_tokens": sums.count}


def make_train_step(
    graphdef: Any,
    optimizer: Any,
    schedule: Any,
    *,
    loss: LossConfig,
    vocab_size: int,
    places: Any = None,
    layerwise: bool = False,
    seed: int = 0,
) -> Any:
    """(state, batch [A,B,T]) → (state, metrics): A micro-batches, one optimizer step.

    One denominator: the valid tokens of the whole step, whatever A and the devices. The gradients
    of A > 1 micro-batches are summed in fp32. `state` is donated. `places`: the shardings of the
    state, which then leaves as it came; a leaf that came back elsewhere would compile again.
    `layerwise`: update each layer inside the backward pass; the optimizer must treat every element
    for itself (no clipping, not adafactor). `seed`: of what is rounded by chance.

    Raises:
        Refusal: layerwise with A > 1.
    """
    knobs: dict[str, Any] = {"loss": loss, "vocab_size": vocab_size}

    def step_fn(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict]:
        micros = batch["mask"].shape[0]
        if layerwise and micros > 1:
            raise Refusal(
                f"expected one micro-batch a step with optimizer.layerwise, got {micros}; "
                "set train.micro_batch_size to train.batch_size"
            )
        if layerwise:
            one = jax.tree.map(lambda x: x[0], batch)
            state, squares, sums = _update_by_layer(
                graphdef, optimizer, state, one, seed=seed, **knobs
            )
        else:
            grads, sums = _gradients(graphdef, state.params, batch, **knobs)
            squares = _sum_of_squares(grads)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = apply_updates(state.params, updates, seed=seed, step=state.step)
            state = TrainState(params, opt_state, state.step)
        metrics = means(sums)
        metrics["gradient_norm"] = jnp.sqrt(squares)
        metrics["learning_rate"] = schedule(state.step)
        return state._replace(step=state.step + 1), metrics

    return jax.jit(step_fn, donate_argnums=0, out_shardings=(places, None))


def _sum_of_squares(grads: Any) -> jax.Array:
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return sum(squares, jnp.float32(0))


def _gradients(
    graphdef: Any,
    params: Any,
    batch: dict[str, jax.Array],
    *,
    loss: LossConfig,
    vocab_size: int,
) -> tuple[Any, losses.LossSums]:
    """Of the mean loss over a batch [A,B,T], in the parameters' dtype, fp32 where A > 1; and the
    sums."""
    count = jnp.maximum(jnp.sum(batch["mask"], dtype=jnp.float32), 1.0)

    def scaled(params: Any, micro: dict[str, jax.Array]) -> tuple[jax.Array, losses.LossSums]:
        total, sums = loss_fn(params, graphdef, micro, loss=loss, vocab_size=vocab_size)
        return total / count, sums

    if batch["mask"].shape[0] == 1:
        return jax.grad(scaled, has_aux=True)(params, jax.tree.map(lambda x: x[0], batch))

    def add(total: Any, part: Part, grads: Any) -> Any:
        wide = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), part.of(total), grads)
        return part.put(total, wide)

    def accumulate(carry: Any, micro: dict[str, jax.Array]) -> tuple[Any, None]:
        total, before = carry
        finish = _finish(micro, count, loss=loss, vocab_size=vocab_size)
        total, sums = backward(graphdef, params, micro, finish=finish, carry=total, use=add)
        return (total, jax.tree.map(jnp.add, before, sums)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    nothing = losses.LossSums(*[jnp.float32(0)] * len(losses.LossSums._fields))
    (grads, sums), _ = jax.lax.scan(accumulate, (zeros, nothing), batch)
    return grads, sums


def _finish(
    batch: dict[str, jax.Array], count: jax.Array, *, loss: LossConfig, vocab_size: int
) -> Any:
    """What follows the layers: (model, x [B·T,D]) → (loss / count, sums)."""

    def finish(model: Decoder, x: jax.Array) -> tuple[jax.Array, losses.LossSums]:
        hidden = model.norm(x).reshape(*batch["tokens"].shape, -1)
        sums = batch_sums(model, hidden, batch, loss=loss, vocab_size=vocab_size)
        return sums.loss / count, sums

    return finish


def _update_by_layer(
    graphdef: Any,
    optimizer: Any,
    state: TrainState,
    batch: dict[str, jax.Array],
    *,
    seed: int,
    loss: LossConfig,
    vocab_size: int,
) -> tuple[TrainState, jax.Array, losses.LossSums]:
    """The state after a batch [B,T] but for its step, the gradient's sum of squares, the sums.

    The optimizer's counters are those before the step for every part, and move once at the end.
    """
    count = jnp.maximum(jnp.sum(batch["mask"], dtype=jnp.float32), 1.0)

    def update(carry: Any, part: Part, grads: Any) -> Any:
        params, opt_state, squares = carry
        mine = part.of(params)
        updates, moved = optimizer.update(grads, part.of(opt_state), mine, first_row=part.first_row)
        mine = apply_updates(mine, updates, seed=seed, step=state.step, first_row=part.first_row)
        squares = squares + _sum_of_squares(grads)
        return part.put(params, mine), part.put(opt_state, moved), squares

    (params, opt_state, squares), sums = backward(
        graphdef,
        state.params,
        batch,
        finish=_finish(batch, count, loss=loss, vocab_size=vocab_size),
        carry=(state.params, state.opt_state, jnp.float32(0)),
        use=update,
        params_of=lambda carry: carry[0],
    )
    nothing = Part(())  # an update of no parameter moves the counters
    none = nothing.of(params)
    _, moved = optimizer.update(none, nothing.of(opt_state), none)
    opt_state = moved_counters(opt_state, moved)
    return TrainState(params, opt_state, state.step), squares, sums


def make_eval_step(graphdef: Any, *, loss: LossConfig, vocab_size: int) -> Any:
    """(params, batch [B,T]) → LossSums, forward only."""

    def eval_fn(params: Any, batch: dict[str, jax.Array]) -> losses.LossSums:
        return loss_fn(params, graphdef, batch, loss=loss, vocab_size=vocab_size)[1]

    return jax.jit(eval_fn)


def train_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Floating-point operations of forward and backward per token: 6·P + 6·L·H·Q·T.

    P: parameters of the layers' linears and of the head (the embedding is a lookup, norms are
    nothing); a product of n parameters costs 2n forward and 4n backward. Attention: two products of
    2·H·Q·T per token and layer, three passes, half of it by causality. Recomputation is not counted
    (PaLM, arXiv 2204.02311, appendix B, with the causal half).
    """
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    attention = 2 * config.hidden_size * (heads + kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    layers = config.num_hidden_layers
    products = layers * (attention + mlp) + config.vocab_size * config.hidden_size
    return 6.0 * products + 6.0 * layers * heads * sequence_length


def state_shapes(model: Decoder, optimizer: Any, mesh: Mesh) -> tuple[Any, TrainState]:
    """The model's graph, and shape, dtype and place of every leaf of its training state.

    `model` has arrays or placed shapes. A moment lies where its parameter does; what has another
    shape (counters, adafactor's factors) is on every device.
    """
    graphdef, params = nnx.split(model, nnx.Param)
    everywhere = sharding.replicated(mesh)
    moments = jax.eval_shape(optimizer.init, params)

    def beside(leaf: jax.ShapeDtypeStruct, param: Any) -> Any:
        return param.sharding if leaf.shape == param.shape else everywhere

    def placed(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    places = optax.tree_map_params(
        optimizer, beside, moments, params, transform_non_params=lambda _: everywhere
    )
    counter: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return graphdef, TrainState(
        params=jax.tree.map(lambda leaf: placed(leaf, leaf.sharding), params),
        opt_state=jax.tree.map(placed, moments, places),
        step=counter,
    )


def make_state(model: Decoder, optimizer: Any, mesh: Mesh) -> tuple[Any, TrainState]:
    """The model's graph, and its first state, every leaf in its place on the mesh."""
    graphdef, shapes = state_shapes(model, optimizer, mesh)
    params = nnx.state(model, nnx.Param)
    places = jax.tree.map(lambda leaf: leaf.sharding, shapes.opt_state)
    opt_state = jax.jit(optimizer.init, out_shardings=places)(params)
    return graphdef, TrainState(
        params, opt_state, jax.device_put(jnp.int32(0), shapes.step.sharding)
    )
