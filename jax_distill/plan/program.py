"""The programs that are planned, made of shapes alone: no weight, no text, no store.

A model is `nnx.eval_shape`d, its parameters placed as `hf.load_model` places them; the rest follows
from what training and the teacher themselves call. A micro-batches, B rows, T positions, K ids.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding

from jax_distill import hf, sharding, step, student, train
from jax_distill.config import Config, Refusal, find_path
from jax_distill.data import Tokenizer
from jax_distill.model import Decoder, ModelConfig
from jax_distill.model.attention import fast_attention
from jax_distill.optimizer import optimizer_of
from jax_distill.plan.target import Target, need_cudnn
from jax_distill.teacher import capture

TEACHERS = "targets"
"""JAX's name of what finds the teacher's top K."""
STEPS = 1000
"""The schedule's length where `train.steps` is left to the store; a number in the program."""


class Program(NamedTuple):
    """A jitted function, and the shapes it is called with.

    Attributes:
        jitted: the function.
        arguments: trees of ShapeDtypeStruct with shardings; static: the rest, by name.
        parameters, optimizer_state, batch: bytes of one device that the arguments take.
        ahead: bytes of one device that lie there beside the step: what is read, or was made, ahead.
        parameter_shapes: (dtype, dimensions) on one device of what may be a gradient.
        scope: JAX's name of the part that makes logits.
        model: the architecture. attention: its implementation. tokens: of one call. flops: of it,
            by the model's formula.
    """

    jitted: Any
    arguments: tuple[Any, ...]
    static: dict[str, Any]
    parameters: int
    optimizer_state: int
    batch: int
    ahead: int
    parameter_shapes: frozenset[tuple[str, tuple[int, ...]]]
    scope: str
    model: ModelConfig
    attention: str
    tokens: int
    flops: float


def bytes_of(tree: Any) -> int:
    """Bytes that a tree of placed shapes takes of one device."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def make_program(config: Config, target: Target, step_kind: str) -> Program:
    """`train` or `teacher`."""
    mesh = sharding.make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, devices=target.devices)
    build = train_program if step_kind == "train" else teacher_program
    return build(config, target, mesh)


def train_program(config: Config, target: Target, mesh: Mesh) -> Program:
    """One optimizer step, as `train.fit` compiles it."""
    rows = train.micro_batch_size(config)
    sharding.check_rows(mesh, rows, "train.micro_batch_size")
    length = config.data.sequence_length
    model = abstract_decoder(
        student_architecture(config),
        target,
        mesh,
        length=length,
        param_dtype=config.train.param_dtype,
        compute_dtype=config.train.compute_dtype,
        remat=config.train.remat,
    )
    optimizer, schedule = optimizer_of(
        config.optimizer, steps=config.train.steps or STEPS, seed=config.seed
    )
    graphdef, state = step.state_shapes(model, optimizer, mesh)
    jitted = step.make_train_step(
        graphdef,
        optimizer,
        schedule,
        loss=config.loss,
        vocab_size=student_columns(config, model.config),
        places=jax.tree.map(lambda leaf: leaf.sharding, state),
        layerwise=config.optimizer.layerwise,
        seed=config.seed,
    )
    batch = train_batch(config, sharding.batch_sharding(mesh, leading=1))
    tokens = config.train.batch_size * length
    return Program(
        jitted=jitted,
        arguments=(state, batch),
        static={},
        parameters=bytes_of(state.params),
        optimizer_state=bytes_of((state.opt_state, state.step)),
        batch=bytes_of(batch),
        ahead=train.READ_AHEAD * bytes_of(batch),
        parameter_shapes=gradient_shapes(state.params),
        scope="loss",
        model=model.config,
        attention=attention_of(model),
        tokens=tokens,
        flops=tokens * step.train_flops_per_token(model.config, length),
    )


def teacher_program(config: Config, target: Target, mesh: Mesh) -> Program:
    """One batch through the teacher, as `teacher.write_store` runs it."""
    if not config.teacher.path:
        raise Refusal("expected teacher.path for --step teacher, got none; name a teacher")
    rows, length = config.teacher.batch_size, config.data.sequence_length
    sharding.check_rows(mesh, rows, "teacher.batch_size")
    model = abstract_decoder(
        architecture(config.teacher.path, "teacher.path"),
        target,
        mesh,
        length=length,
        param_dtype=config.teacher.dtype,
        compute_dtype=config.teacher.dtype,
        remat="none",
    )
    place = sharding.batch_sharding(mesh)
    row = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=place)
    batch = dict.fromkeys(("tokens", "segment_ids", "positions"), row)
    static = {
        "mesh": mesh,
        "vocab_size": columns_of(config.teacher.path, model.config),
        "top_k": config.cache.top_k,
        "temperatures": tuple(config.cache.temperatures),
        "chunk_size": config.loss.chunk_size,
    }
    made = jax.eval_shape(lambda m, b: capture(m, b, **static), model, batch)
    results = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
    tokens = rows * length
    calls = -(-config.cache.shard_rows // rows)  # a shard's batches are all on their way at once
    held = bytes_of(batch) + results // mesh.size
    return Program(
        jitted=capture,
        arguments=(model, batch),
        static=static,
        parameters=bytes_of(nnx.state(model, nnx.Param)),
        optimizer_state=0,
        batch=bytes_of(batch),
        ahead=(calls - 1) * held,
        parameter_shapes=frozenset(),
        scope=TEACHERS,
        model=model.config,
        attention=attention_of(model),
        tokens=tokens,
        flops=tokens * step.train_flops_per_token(model.config, length) / 3,
    )


def abstract_decoder(
    config: ModelConfig,
    target: Target,
    mesh: Mesh,
    *,
    length: int,
    param_dtype: str,
    compute_dtype: str,
    remat: str,
) -> Decoder:
    """The model as `hf.load_model` would give it, its parameters placed shapes. Attention is what
    a run on the target's devices would choose."""
    dtype = jnp.dtype(compute_dtype)
    attention = fast_attention(dtype, length, config.head_dim, target.devices[0])
    if attention == "cudnn":
        need_cudnn(target)

    def build() -> Decoder:
        return Decoder(
            config,
            rngs=nnx.Rngs(0),
            param_dtype=jnp.dtype(param_dtype),
            compute_dtype=dtype,
            remat=remat,
            attention=attention,
            rows=sharding.batch_sharding(mesh),
        )

    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    placed = []
    for path, param in nnx.to_flat_state(abstract):
        place: Sharding = sharding.parameter_sharding(mesh, param.logical_axes, param.shape)
        shape = jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=place)
        placed.append((path, param.replace(shape)))
    return nnx.merge(graphdef, nnx.from_flat_state(placed))


def attention_of(model: Decoder) -> str:
    return str(model.layers.self_attn.implementation)


def gradient_shapes(params: Any) -> frozenset[tuple[str, tuple[int, ...]]]:
    """(dtype, dimensions) on one device that gradients of `params` have: the parameter's own, and
    one layer's of it; in the parameter's dtype and in fp32, in which they are summed."""
    found = set()
    for leaf in jax.tree.leaves(params):
        local = leaf.sharding.shard_shape(leaf.shape)
        for dtype in {str(leaf.dtype), "float32"}:
            found.add((HLO_NAMES[dtype], local))
            if len(local) == 3:
                found |= {(HLO_NAMES[dtype], local[1:]), (HLO_NAMES[dtype], (1, *local[1:]))}
    return frozenset(found)


HLO_NAMES = {"float32": "f32", "bfloat16": "bf16"}


def train_batch(config: Config, place: Sharding) -> dict[str, jax.ShapeDtypeStruct]:
    """What `train.batches` puts on the devices: [A,B,T], as `Store.read` gives it."""
    rows = train.micro_batch_size(config)
    grid = (config.train.batch_size // rows, rows, config.data.sequence_length)
    layout: dict[str, Any] = dict.fromkeys(
        ("tokens", "labels", "segment_ids", "positions"), (grid, jnp.int32)
    )
    layout["mask"] = (grid, jnp.bool_)
    if config.teacher.path:
        wide = (*grid, config.cache.read_top_k or config.cache.top_k)
        layout["teacher_indices"] = (wide, jnp.int32)
        layout["teacher_logprobs"] = (wide, jnp.float32)
        layout["teacher_log_tail"] = (grid, jnp.float32)
        layout["teacher_count"] = (grid, jnp.int32)
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        for name, (shape, dtype) in layout.items()
    }


def student_architecture(config: Config) -> ModelConfig:
    """The student's, from its own folder or cut from the teacher's."""
    cut = config.student.from_teacher
    if cut is None:
        return architecture(config.student.path, "student.path")
    if not config.teacher.path:
        raise Refusal("expected teacher.path for student.from_teacher, got none; name a teacher")
    whole = architecture(config.teacher.path, "teacher.path")
    layers = student.kept_layers(whole, layers=cut.layers, parameters=cut.parameters)
    return dataclasses.replace(whole, num_hidden_layers=len(layers))


def student_columns(config: Config, model: ModelConfig) -> int:
    """Real columns of the student's head; see `columns_of`."""
    return columns_of(config.student.path or config.teacher.path, model)


def columns_of(path: str, model: ModelConfig) -> int:
    """Columns that stand for a token: as many as the tokenizer beside the model has, or all."""
    folder = Path(find_path(path))
    if not (folder / "tokenizer.json").is_file():
        return model.vocab_size
    return min(Tokenizer.load(folder).length, model.vocab_size)


def architecture(path: str, key: str) -> ModelConfig:
    """The architecture of the model at `path`: a folder with config.json, a GGUF file, or a hub id
    whose config.json is among the shipped `configs/` (it names the model) or in the hub's cache.

    Raises:
        Refusal: none of these.
    """
    return hf.model_config(hf.read_config(model_folder(path, key)))


def model_folder(path: str, key: str) -> Path:
    """Where the model's config.json lies; see `architecture`."""
    place = Path(find_path(path)).expanduser()
    if place.is_dir():
        return place
    if place.suffix == ".gguf":
        return hf.local_folder(place)
    for folder in shipped_models():
        if hf.read_config(folder).get("_name_or_path") == path:
            return folder
    if cached := hub_cache(path):
        return cached
    raise Refusal(
        f"expected a folder with config.json for {key}, got {path}, which is not on this disk; "
        f"do give --{key} FOLDER (its config.json is enough)"
    )


def shipped_models() -> list[Path]:
    """The folders of `configs/` that hold a config.json."""
    return sorted(path.parent for path in Path(find_path("configs")).glob("*/config.json"))


def hub_cache(hub_id: str) -> Path | None:
    """The folder of the hub's cache that holds the model's config.json; nothing is fetched."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(hub_id, "config.json")
    except ValueError:  # no hub id at all
        return None
    return Path(found).parent if isinstance(found, str) else None
