"""One optimizer step: pure functions from state and batch to state and numbers.

`fit.py` runs it, `plan` and `bench` look at it from outside.

Letters: B rows, T positions, A micro-batches, D hidden.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jax_distill import losses
from jax_distill.batch import Batch, LiveTeacher
from jax_distill.model import Aux, Decoder, ModelConfig, Output, RouterLoad
from jax_distill.objective import Execution, HiddenObjective, Objective
from jax_distill.targets import batch_targets
from jax_distill.training.gradients import ParameterSlice, backward
from jax_distill.training.offload import as_output, offloaded
from jax_distill.training.projection import projection_of
from jax_distill.training.state import TrainState
from jax_distill.training.updates import Updates

Metrics = dict[str, jax.Array]
TrainStep = Callable[..., tuple[TrainState, Metrics]]


class Live(NamedTuple):
    """A teacher that runs beside the student, but for its parameters.

    Attributes:
        graphdef: its graph. temperature: τ of the divergence.
        top_k: how many of its largest logits the loss reads, as from a cache; None: the whole
            vocabulary, which then is the student's.
        vocab_size: how many of its ids are real, and mesh, for top_k.
    """

    graphdef: nnx.GraphDef[Decoder]
    temperature: float
    top_k: int | None = None
    vocab_size: int = 0
    mesh: Mesh | None = None


class LossTask(NamedTuple):
    """What every step of a run scores its model with.

    vocab_size: the ids that the head has; its rows beyond are padding. router_weight: of the
    load-balancing term of a model with experts, see `RouterLoad.balance`. live: of a teacher that
    runs beside the student; teacher: itself, inside a step, which takes its parameters. hidden: the
    hidden-state term.
    """

    objective: Objective
    execution: Execution
    vocab_size: int
    router_weight: float = 0.0
    live: Live | None = None
    teacher: Decoder | None = None
    hidden: HiddenObjective | None = None

    @property
    def student_layers(self) -> tuple[int, ...]:
        """The layers whose outputs the loss reads."""
        return () if self.hidden is None else self.hidden.student_layers

    def with_teacher(self, params: nnx.State | None) -> "LossTask":
        """The task with its live teacher's parameters; the same without."""
        if self.live is None or params is None:
            return self
        return self._replace(teacher=nnx.merge(self.live.graphdef, params))

    def _targets(self, batch: Batch) -> Batch:
        """The batch with the live teacher's outputs for it, of which nothing is differentiated."""
        if self.live is None or self.teacher is None:
            return batch
        live, weight = self.live, self.teacher.lm_head_weight()
        inputs = (batch.tokens, batch.segment_ids, batch.positions)
        chosen = () if self.hidden is None else self.hidden.teacher_layers
        output = jax.lax.stop_gradient(self.teacher.apply(*inputs, hidden_layers=chosen))
        if chosen:
            batch = replace(batch, teacher_layers=jnp.moveaxis(output.layers, 0, 2))
        if live.top_k is None:
            head = losses.Head(weight, vocab_size=self.vocab_size)
            teacher = LiveTeacher(output.hidden, head, live.temperature)
            return replace(batch, targets=None, teacher=teacher)
        assert live.mesh is not None
        found, _ = batch_targets(
            output.hidden,
            jax.lax.stop_gradient(weight),
            batch.segment_ids,
            mesh=live.mesh,
            vocab_size=live.vocab_size,
            top_k=live.top_k,
            temperatures=(live.temperature,),
            chunk_size=self.execution.chunk_size,
        )
        return replace(batch, targets=found.decode(live.temperature))

    def sums(self, model: Decoder, output: Output, batch: Batch) -> "StepSums":
        """The loss of a model's output against a batch [B,T], and the sums it is made of. The
        load-balancing term counts once for each valid token of the batch."""
        head = losses.Head(model.lm_head_weight(), vocab_size=self.vocab_size)
        batch = self._targets(batch)
        sums = losses.loss(output.hidden, head, batch, self.objective, self.execution)
        if self.router_weight and isinstance(output.aux, RouterLoad):
            term = self.router_weight * output.aux.balance()
            sums = sums._replace(loss=sums.loss + sums.count * term)
        if self.hidden is None:
            return StepSums(sums, output.aux)
        distance = losses.hidden_sum(
            output.layers,
            batch.teacher_layers,
            batch.mask,
            projection_of(model),
            kind=self.hidden.kind,
        )
        sums = sums._replace(loss=sums.loss + self.hidden.weight * distance)
        return StepSums(sums, output.aux, jax.lax.stop_gradient(distance))


def loss_fn(
    params: nnx.State, graphdef: nnx.GraphDef[Decoder], batch: Batch, task: LossTask
) -> tuple[jax.Array, "StepSums"]:
    """Summed loss of a batch [B,T], and the sums it is made of."""
    model = nnx.merge(graphdef, params)
    inputs = (batch.tokens, batch.segment_ids, batch.positions)
    output = model.apply(*inputs, hidden_layers=task.student_layers)
    sums = task.sums(model, output, batch)
    return sums.loss.loss, sums


class StepSums(NamedTuple):
    """Of all micro-batches: the loss, the routers' load [L,E] (`Output.aux`), and the hidden-state
    distance without its weight; () where there is none."""

    loss: losses.LossSums
    load: Aux
    hidden: Any = ()

    def metrics(self) -> Metrics:
        """`means`, `hidden_loss` per valid token, and of a model with experts `router_balance` (1:
        all get the same) and `router_largest_share`: of what is sent in a layer, by which expert
        ever."""
        values = means(self.loss)
        if not isinstance(self.hidden, tuple):
            values["hidden_loss"] = self.hidden / jnp.maximum(self.loss.count, 1.0)
        if isinstance(self.load, RouterLoad):
            sent = self.load.assigned
            values["router_balance"] = self.load.balance()
            total = jnp.maximum(sent.sum(axis=-1, keepdims=True), 1.0)
            values["router_largest_share"] = jnp.max(sent / total)
        return values


def _no_sums(config: ModelConfig, task: LossTask) -> StepSums:
    experts = config.num_local_experts
    none = jnp.zeros((config.num_hidden_layers, experts), jnp.float32)
    load = RouterLoad(none, none) if experts else ()
    return StepSums(losses.zero_sums(), load, jnp.float32(0) if task.hidden else ())


def means(sums: losses.LossSums) -> Metrics:
    """Sums over tokens → means per valid token (0 where there is none), and the count itself."""
    count = jnp.maximum(sums.count, 1.0)
    values = {k: v / count for k, v in sums._asdict().items() if k != "count"}
    return {**values, "valid_tokens": sums.count}


def make_train_step(
    graphdef: nnx.GraphDef[Decoder],
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    task: LossTask,
    *,
    shardings: TrainState | None = None,
    layerwise: bool = False,
    seed: int = 0,
) -> TrainStep:
    """(state, batch [A,B,T], parameters of the task's live teacher) → (state, metrics): A
    micro-batches, one optimizer step, jitted.

    One denominator: the valid tokens of the whole step, whatever A and the devices. The gradients
    of A > 1 micro-batches are summed in fp32. `state` is donated. `shardings`: those of the state,
    which then leaves as it came; a leaf that came back sharded otherwise would compile again.
    `layerwise`: update each layer inside the backward pass; wants A = 1, and an optimizer that
    treats every element for itself (no clipping, not adafactor). `seed`: of stochastic rounding.
    """

    split = shardings is not None and not all(
        each.is_fully_replicated for each in jax.tree.leaves(shardings.params)
    )
    updates = Updates(optimizer, seed, whole=split)

    def step_fn(
        state: TrainState, batch: Batch, teacher: nnx.State | None = None
    ) -> tuple[TrainState, Metrics]:
        bound = task.with_teacher(teacher)
        if layerwise:
            state, squares, sums = _update_in_backward(graphdef, updates, state, batch, bound)
        else:
            grads, sums = _gradients(graphdef, state.params, batch, bound)
            squares = _sum_of_squares(grads)
            update = updates.by_slices if offloaded(state.opt_state) else updates.at_once
            state = update(state, grads, jnp.sqrt(squares))
        metrics = sums.metrics()
        metrics["gradient_norm"] = jnp.sqrt(squares)
        metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
        return state._replace(step=state.step + 1), metrics

    if shardings is not None:
        shardings = jax.tree.map(as_output, shardings)
    return jax.jit(step_fn, donate_argnums=0, out_shardings=(shardings, None))


def _sum_of_squares(grads: nnx.State) -> jax.Array:
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return sum(squares, jnp.float32(0))


def _valid_tokens(batch: Batch) -> jax.Array:
    """What a step's loss is divided by: the valid tokens of [A,B,T], at least 1."""
    return jnp.maximum(jnp.sum(batch.mask, dtype=jnp.float32), 1.0)


def _mean_loss(
    micro: Batch, count: jax.Array, task: LossTask
) -> Callable[[Decoder, Output], tuple[jax.Array, StepSums]]:
    """(model, its output for `micro` [B,T]) → (summed loss / count, sums)."""

    def loss(model: Decoder, output: Output) -> tuple[jax.Array, StepSums]:
        sums = task.sums(model, output, micro)
        return sums.loss.loss / count, sums

    return loss


def _gradients(
    graphdef: nnx.GraphDef[Decoder], params: nnx.State, batch: Batch, task: LossTask
) -> tuple[nnx.State, StepSums]:
    """Of the mean loss over a batch [A,B,T], in the parameters' dtype, fp32 where A > 1; and the
    sums."""
    several = batch.mask.shape[0] > 1
    count = _valid_tokens(batch)

    def assign(_: jax.Array, grad: jax.Array) -> jax.Array:
        return grad

    def add(total: jax.Array, grad: jax.Array) -> jax.Array:
        return total + grad.astype(jnp.float32)

    def keep(total: nnx.State, some: ParameterSlice, grads: nnx.State) -> nnx.State:
        new = jax.tree.map(add if several else assign, some.read(total), grads)
        return some.write(total, new)

    def accumulate(
        carry: tuple[nnx.State, StepSums], micro: Batch
    ) -> tuple[tuple[nnx.State, StepSums], None]:
        total, before = carry
        loss = _mean_loss(micro, count, task)
        total, sums = backward(
            graphdef,
            params,
            micro,
            loss_fn=loss,
            carry=total,
            on_gradient=keep,
            hidden_layers=task.student_layers,
        )
        return (total, jax.tree.map(jnp.add, before, sums)), None

    def zeros(param: jax.Array) -> jax.Array:
        return jnp.zeros(param.shape, jnp.float32 if several else param.dtype)

    none = _no_sums(nnx.merge(graphdef, params).config, task)
    start = jax.tree.map(zeros, params), none
    if several:
        return jax.lax.scan(accumulate, start, batch)[0]
    return accumulate(start, batch.map(lambda x: x[0]))[0]


def _update_in_backward(
    graphdef: nnx.GraphDef[Decoder],
    updates: Updates,
    state: TrainState,
    batch: Batch,
    task: LossTask,
) -> tuple[TrainState, jax.Array, StepSums]:
    """The state after a batch [1,B,T] but for its step, the gradient's sum of squares, the sums.

    The optimizer's counters are those before the step for every slice, and advance once at the end.
    """
    (micros, *_), micro = batch.mask.shape, batch.map(lambda x: x[0])
    assert micros == 1, "the configuration refuses several micro-batches with layerwise"
    Carry = tuple[TrainState, jax.Array]

    def update(carry: Carry, some: ParameterSlice, grads: nnx.State) -> Carry:
        state, squares = carry
        if some.first is None and offloaded(state.opt_state):
            state = updates.modules(state, grads, None)
        else:
            state = updates.slice(some, state, grads, None)
        return state, squares + _sum_of_squares(grads)

    (state, squares), sums = backward(
        graphdef,
        state.params,
        micro,
        loss_fn=_mean_loss(micro, _valid_tokens(batch), task),
        carry=(state, jnp.float32(0)),
        on_gradient=update,
        params_of=lambda carry: carry[0].params,
        hidden_layers=task.student_layers,
    )
    return updates.advance(state), squares, sums


def make_eval_step(graphdef: nnx.GraphDef[Decoder], task: LossTask) -> Callable[..., StepSums]:
    """(params, batch [B,T], parameters of the task's live teacher) → StepSums without the routers'
    load, forward only, jitted."""

    def eval_fn(params: nnx.State, batch: Batch, teacher: nnx.State | None = None) -> StepSums:
        sums = loss_fn(params, graphdef, batch, task.with_teacher(teacher))[1]
        return sums._replace(load=())

    return jax.jit(eval_fn)
