"""The train step of a configuration, made of shapes alone: no weight, no text, no cache.

`plan` compiles it for a device that need not be there, `bench` fills the shapes and runs it.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_distill import losses, sharding
from jax_distill.attention import Implementation, default_attention
from jax_distill.base.errors import UserError
from jax_distill.batch import Batch
from jax_distill.config import Config
from jax_distill.hf.locate import Architecture
from jax_distill.hidden_layers import with_pairs
from jax_distill.model import Decoder, ExpertsImplementation, ModelConfig, train_flops_per_token
from jax_distill.training.inputs import batch_shapes
from jax_distill.training.optimizer import optimizer_of
from jax_distill.training.projection import add_projection
from jax_distill.training.state import TrainState, state_shapes
from jax_distill.training.step import Live, LossTask, make_eval_step, make_train_step

STEPS = 1000
"""The schedule's length where the cache decides `train.steps`; it is a constant in the program."""


class Programs(NamedTuple):
    """The jitted functions of a run, the shapes of the state that they take, and the parameters of
    a live teacher.

    train_step: (state, batch, teacher) → (state, metrics); see `make_train_step`. eval_step:
    (params, batch, teacher) → StepSums. shapes: leaves are jax.ShapeDtypeStruct.
    """

    train_step: Any
    eval_step: Any
    graphdef: nnx.GraphDef[Decoder]
    shapes: TrainState
    optimizer: Any
    teacher: nnx.State | None

    def state_bytes(self) -> int:
        """Of parameters and moments, as a checkpoint has them."""
        leaves = jax.tree.leaves((self.shapes.params, self.shapes.opt_state))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def make_programs(
    config: Config,
    model: Decoder,
    mesh: Mesh,
    *,
    steps: int,
    vocab_size: int,
    teacher: Decoder | None,
    teacher_vocab_size: int,
) -> Programs:
    """Of a configuration whose hidden layers are pairs, a student (its parameters may be shapes)
    and perhaps a live teacher; nothing is compiled yet. teacher_vocab_size: its real ids.

    Raises:
        UserError: a load-balancing term for a student without experts.
    """
    if config.loss.router_weight and not model.config.num_local_experts:
        raise UserError(
            "expected a student with experts for loss.router_weight "
            f"{config.loss.router_weight}, got one without; set it to 0"
        )
    optimizer, schedule = optimizer_of(config.optimizer, steps=steps, seed=config.seed)
    graphdef, shapes = state_shapes(model, optimizer, mesh, offload=config.optimizer.offload)
    loss = config.loss
    execution = loss.execution(row_shards=sharding.row_shards(mesh))
    if teacher is None:
        execution = replace(execution, layout=vocabulary_layout(mesh, model, loss.implementation))
    task = LossTask(
        loss.objective(),
        execution,
        vocab_size,
        loss.router_weight,
        hidden=loss.hidden_objective(),
    )
    teacher_params = None
    if teacher is not None:
        teacher_graph, teacher_params = nnx.split(teacher, nnx.Param)
        top_k = config.cache.top_k if config.teacher.mode == "online_top_k" else None
        live = Live(teacher_graph, loss.temperature, top_k, teacher_vocab_size, mesh)
        task = task._replace(live=live)
    train_step = make_train_step(
        graphdef,
        optimizer,
        schedule,
        task,
        shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes),
        layerwise=config.optimizer.layerwise,
        seed=config.seed,
    )
    eval_step = make_eval_step(graphdef, task)
    return Programs(train_step, eval_step, graphdef, shapes, optimizer, teacher_params)


def vocabulary_layout(mesh: Mesh, model: Decoder, implementation: str) -> losses.Layout | None:
    """The layout of `fused` where the mesh has a `tensor` axis that divides the head's rows: they
    stay split over it, hidden stays with its rows, and per-token numbers travel; the head is
    gathered over the other axes once a batch, as a layer's weights are.

    None elsewhere: the vocabulary is split over the devices that split the rows, and the compiler
    gathers hidden over these chunk by chunk. The whole head and its fp32 gradient on each device
    would be 6 bytes · V · D, and more to send up to about V tokens a batch.
    """
    tensor = sharding.axis_size(mesh, ("tensor",))
    if implementation != "fused" or tensor == 1 or model.config.vocab_size % tensor:
        return None
    return losses.Layout(mesh, rows=sharding.row_axes(mesh), vocabulary="tensor")


class TrainProgram(NamedTuple):
    """A train step and what it is called with.

    Attributes:
        step: jitted, (state, batch, teacher) → (state, metrics); see `make_train_step`.
        state, batch, teacher: their shapes under their shardings; leaves are
            jax.ShapeDtypeStruct. teacher: of a live one, else None.
        attention: its implementation.
        tokens: of one step. flops: of one step, by the models' formula.
    """

    step: Any
    state: TrainState
    batch: Batch
    teacher: nnx.State | None
    attention: str
    tokens: int
    flops: float


def train_program(
    config: Config,
    model: ModelConfig,
    vocab_size: int,
    mesh: Mesh,
    *,
    teacher: Architecture | None = None,
) -> TrainProgram:
    """The step that `fit` compiles for this configuration and student on `mesh`. teacher: with its
    vocab_size, where it is live or its hidden states are read.

    Raises:
        UserError: rows that the mesh cannot split, options that exclude each other.
    """
    train, length = config.train, config.data.sequence_length
    sharding.check_rows(mesh, train.rows_per_micro_batch, "train.micro_batch_size")
    shared: dict[str, Any] = {
        "length": length,
        "attention": train.attention_implementation,
        "experts": train.experts,
    }
    dtypes: dict[str, Any] = {
        "param_dtype": train.param_dtype,
        "compute_dtype": train.compute_dtype,
    }
    decoder = abstract_decoder(model, mesh, remat=train.remat, **dtypes, **shared)
    live, width = None, 0
    if teacher is not None:
        depths = {"student": model.num_hidden_layers, "teacher": teacher.model.num_hidden_layers}
        config, width = with_pairs(config, **depths), teacher.model.hidden_size
    if hidden := config.loss.hidden_objective():
        pairs = len(hidden.pairs)
        add_projection(
            decoder, pairs=pairs, teacher_width=width, mesh=mesh, seed=config.seed, abstract=True
        )
    if teacher is not None and config.teacher.is_live:
        dtypes = dict.fromkeys(dtypes, config.teacher.dtype)
        packed = config.teacher.packed_experts
        live = abstract_decoder(teacher.model, mesh, packed_experts=packed, **dtypes, **shared)
    programs = make_programs(
        config,
        decoder,
        mesh,
        steps=train.steps or STEPS,
        vocab_size=vocab_size,
        teacher=live,
        teacher_vocab_size=teacher.vocab_size if teacher else 0,
    )
    tokens = train.batch_size * length
    return TrainProgram(
        step=programs.train_step,
        state=programs.shapes,
        batch=batch_shapes(config, sharding.batch_sharding(mesh, leading=1), teacher_width=width),
        teacher=programs.teacher,
        attention=str(decoder.layers.self_attn.implementation),
        tokens=tokens,
        flops=tokens * step_flops_per_token(model, live.config if live else None, length),
    )


def step_flops_per_token(model: ModelConfig, teacher: ModelConfig | None, length: int) -> float:
    """Of one step by the models' formula: the student forward and backward, a live teacher
    forward, a third of that. Projections of hidden states are not counted."""
    flops = train_flops_per_token(model, length)
    return flops + (train_flops_per_token(teacher, length) / 3 if teacher else 0.0)


def abstract_decoder(
    config: ModelConfig,
    mesh: Mesh,
    *,
    length: int,
    param_dtype: str,
    compute_dtype: str,
    remat: str = "none",
    attention: Implementation | None = None,
    experts: ExpertsImplementation = "blocks",
    packed_experts: bool = False,
) -> Decoder:
    """The model as `hf.load_model` would give it on `mesh`, its parameters shapes with shardings.
    `attention` None is what a run on the mesh's devices would choose."""
    config = replace(config, packed_experts=packed_experts)
    dtype = jnp.dtype(compute_dtype)
    device = mesh.devices.flat[0]
    chosen = attention or default_attention(dtype, length, config.head_dim, device=device)

    def build() -> Decoder:
        return Decoder(
            config,
            rngs=nnx.Rngs(0),
            param_dtype=jnp.dtype(param_dtype),
            compute_dtype=dtype,
            remat=remat,
            attention=chosen,
            experts=experts,
            row_sharding=sharding.batch_sharding(mesh),
        )

    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    leaves = []
    for path, param in nnx.to_flat_state(abstract):
        where = sharding.parameter_sharding(mesh, param.logical_axes, param.shape)
        leaf = jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=where)
        leaves.append((path, param.replace(leaf)))
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))
