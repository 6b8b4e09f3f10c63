"""The programs that are planned, and what they hold of each device by the shapes alone."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jax_distill import sharding, student
from jax_distill.base.errors import UserError
from jax_distill.config import Config
from jax_distill.hf.locate import find_architecture
from jax_distill.hidden_layers import cached_layers
from jax_distill.model import train_flops_per_token
from jax_distill.plan.target import Target, need_cudnn
from jax_distill.targets import capture
from jax_distill.teacher.writing import AHEAD
from jax_distill.training.inputs import READ_AHEAD
from jax_distill.training.offload import host_bytes, is_on_host
from jax_distill.training.program import abstract_decoder, train_program

TEACHER_SCOPE = "targets"
"""JAX's name of what finds the teacher's top K."""
HLO_NAMES = {"float32": "f32", "bfloat16": "bf16"}


class Program(NamedTuple):
    """A jitted function, and the shapes it is called with. Bytes are of one device.

    Attributes:
        jitted: the function.
        arguments: trees of ShapeDtypeStruct with shardings; static: the rest, by name.
        parameters, teacher (a live one), optimizer_state, batch: bytes that the arguments take.
        ahead: bytes that lie there beside the program: what is read, or was made, ahead.
        host: bytes of the host's memory that all devices together take, by name.
        gradient_shapes: (HLO dtype, dimensions) on one device of what may be a gradient.
        scope: JAX's name of the part that makes logits.
        attention: its implementation. tokens: of one call. flops: of it, by the model's formula.
    """

    jitted: Any
    arguments: tuple[Any, ...]
    static: dict[str, Any]
    parameters: int
    teacher: int
    optimizer_state: int
    batch: int
    ahead: int
    host: dict[str, int]
    gradient_shapes: frozenset[tuple[str, tuple[int, ...]]]
    scope: str
    attention: str
    tokens: int
    flops: float


def bytes_of(tree: Any) -> int:
    """Bytes that a tree of shapes with shardings takes of one device; those in the host's memory
    do not count."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if not _on_other_memory(leaf)
    )


def _on_other_memory(leaf: Any) -> bool:
    """Whether it is in the host's memory, and the device has one of its own."""
    return is_on_host(leaf) and next(iter(leaf.sharding.device_set)).platform != "cpu"


def make_program(config: Config, target: Target, step: str) -> Program:
    """`train`: one optimizer step; `teacher`: one batch through the teacher.

    Raises:
        UserError: the configuration cannot be run so, or cuDNN's library is missing.
    """
    mesh = sharding.make_mesh(**config.mesh.axes, devices=target.devices)
    program = _train(config, mesh) if step == "train" else _teacher(config, mesh)
    if program.attention == "cudnn":
        need_cudnn(target)
    return program


def _train(config: Config, mesh: Mesh) -> Program:
    teacher = None
    if config.teacher.is_live or config.loss.hidden_weight:
        teacher = find_architecture(config.teacher.path, "teacher.path")
    made = train_program(config, *student.planned_architecture(config), mesh, teacher=teacher)
    on_gpu = mesh.devices.flat[0].platform != "cpu"
    return Program(
        jitted=made.step,
        arguments=(made.state, made.batch, made.teacher),
        static={},
        parameters=bytes_of(made.state.params),
        teacher=bytes_of(made.teacher),
        optimizer_state=bytes_of((made.state.opt_state, made.state.step)),
        batch=bytes_of(made.batch),
        ahead=READ_AHEAD * bytes_of(made.batch),
        host=host_bytes(made.state.params, made.state.opt_state) if on_gpu else {},
        gradient_shapes=gradient_shapes(made.state.params),
        scope="loss",
        attention=made.attention,
        tokens=made.tokens,
        flops=made.flops,
    )


def _teacher(config: Config, mesh: Mesh) -> Program:
    """As `teacher.write_cache` runs it."""
    if not config.teacher.path:
        raise UserError("expected teacher.path for --step teacher, got none; name a teacher")
    rows, length = config.teacher.batch_size, config.data.sequence_length
    sharding.check_rows(mesh, rows, "teacher.batch_size")
    architecture, vocab_size = find_architecture(config.teacher.path, "teacher.path")
    dtype = config.teacher.dtype
    model = abstract_decoder(
        architecture,
        mesh,
        length=length,
        param_dtype=dtype,
        compute_dtype=dtype,
        attention=config.train.attention_implementation,
        experts=config.train.experts,
        packed_experts=config.teacher.packed_experts,
    )
    row = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding.batch_sharding(mesh))
    batch = dict.fromkeys(("tokens", "segment_ids", "positions"), row)
    if config.cache.is_random:
        shape = (rows, length, config.cache.samples, 2)
        batch["uniforms"] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=row.sharding)
    static = {
        "mesh": mesh,
        "vocab_size": vocab_size,
        "top_k": config.cache.stored_top_k,
        "top_p": config.cache.top_p,
        "temperatures": tuple(config.cache.temperatures),
        "chunk_size": config.loss.chunk_size,
        "hidden_layers": tuple(
            cached_layers(config.cache.hidden_layers, architecture.num_hidden_layers)
        ),
    }
    made = jax.eval_shape(lambda m, b: capture(m, b, **static), model, batch)
    results = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made)
    ) // sharding.row_shards(mesh)
    return Program(
        jitted=capture,
        arguments=(model, batch),
        static=static,
        parameters=bytes_of(nnx.state(model, nnx.Param)),
        teacher=0,
        optimizer_state=0,
        batch=bytes_of(batch),
        ahead=AHEAD * (bytes_of(batch) + results),
        host={},
        gradient_shapes=frozenset(),
        scope=TEACHER_SCOPE,
        attention=str(model.layers.self_attn.implementation),
        tokens=rows * length,
        flops=rows * length * train_flops_per_token(architecture, length) / 3,
    )


def gradient_shapes(params: Any) -> frozenset[tuple[str, tuple[int, ...]]]:
    """(HLO dtype, dimensions) on one device that gradients of `params` have: the parameter's own,
    and one layer's of it; in the parameter's dtype and in fp32, in which they are summed."""
    found = set()
    for leaf in jax.tree.leaves(params):
        local = leaf.sharding.shard_shape(leaf.shape)
        layer = {local[1:], (1, *local[1:])} if len(local) == 3 else set()
        for dtype in {str(leaf.dtype), "float32"}:
            found |= {(HLO_NAMES[dtype], dimensions) for dimensions in {local} | layer}
    return frozenset(found)
