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
from jax_distill.config import LossConfig
from jax_distill.model import Decoder, ModelConfig


class TrainState(NamedTuple):
    """All that a step changes. `step` counts finished optimizer steps."""

    params: Any
    opt_state: Any
    step: jax.Array


def loss_fn(
    params: Any, graphdef: Any, batch: dict[str, jax.Array], *, loss: LossConfig, vocab_size: int
) -> tuple[jax.Array, losses.LossSums]:
    """Summed loss of a batch [B,T], and the sums it is made of. vocab_size: the columns that are
    real; what the head has beyond is padding."""
    model = nnx.merge(graphdef, params)
    hidden = model.hidden_states(batch["tokens"], batch["segment_ids"], batch["positions"])
    sums = losses.IMPLEMENTATIONS[loss.implementation](
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
    )
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
) -> Any:
    """(state, batch [A,B,T]) → (state, metrics): A micro-batches, one optimizer step.

    One denominator: the valid tokens of the whole step, whatever A and the devices. The gradients
    of A > 1 micro-batches are summed in fp32. `state` is donated. `places`: the shardings of the
    state, which then leaves as it came; a leaf that came back elsewhere would compile again.
    """

    def step_fn(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict]:
        count = jnp.maximum(jnp.sum(batch["mask"], dtype=jnp.float32), 1.0)

        def micro_gradient(micro: dict[str, jax.Array]) -> tuple[Any, losses.LossSums]:
            def scaled(params: Any) -> tuple[jax.Array, losses.LossSums]:
                total, sums = loss_fn(params, graphdef, micro, loss=loss, vocab_size=vocab_size)
                return total / count, sums

            return jax.grad(scaled, has_aux=True)(state.params)

        def accumulate(carry: Any, micro: dict[str, jax.Array]) -> tuple[Any, None]:
            grads, sums = micro_gradient(micro)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            return jax.tree.map(jnp.add, carry, (grads, sums)), None

        if batch["mask"].shape[0] == 1:
            grads, sums = micro_gradient(jax.tree.map(lambda x: x[0], batch))
        else:
            zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
            nothing = losses.LossSums(*[jnp.float32(0)] * len(losses.LossSums._fields))
            (grads, sums), _ = jax.lax.scan(accumulate, (zeros, nothing), batch)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p + u.astype(p.dtype), state.params, updates)
        squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
        metrics = means(sums)
        metrics["gradient_norm"] = jnp.sqrt(sum(squares))
        metrics["learning_rate"] = schedule(state.step)
        return TrainState(params, opt_state, state.step + 1), metrics

    return jax.jit(step_fn, donate_argnums=0, out_shardings=(places, None))


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


def make_state(model: Decoder, optimizer: Any, mesh: Mesh) -> tuple[Any, TrainState]:
    """The model's graph, and the first state with every leaf in its place on the mesh.

    A moment lies where its parameter does; what has another shape (counters, adafactor's factors)
    is on every device.
    """
    graphdef, params = nnx.split(model, nnx.Param)
    everywhere = sharding.replicated(mesh)

    def beside(leaf: jax.ShapeDtypeStruct, param: jax.Array) -> Any:
        return param.sharding if leaf.shape == param.shape else everywhere

    places = optax.tree_map_params(
        optimizer,
        beside,
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda _: everywhere,
    )
    opt_state = jax.jit(optimizer.init, out_shardings=places)(params)
    return graphdef, TrainState(params, opt_state, jax.device_put(jnp.int32(0), everywhere))
