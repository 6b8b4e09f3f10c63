"""The learned projections of a hidden-state loss: parameters beside the student's own, which the
step updates, the checkpoint keeps and the export leaves out."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_distill import sharding
from jax_distill.hidden_layers import PROJECTION, start_projection
from jax_distill.model import Decoder


class Projection(nnx.Module):
    """[P,D',D]: from the student's width D to the teacher's D', one for each pair of layers."""

    def __init__(self, weight: jax.Array | jax.ShapeDtypeStruct):
        axes = (None, "teacher_embed", "embed")
        self.weight = nnx.Param(weight, logical_axes=axes, weight_decay=True)


def add_projection(
    model: Decoder, *, pairs: int, teacher_width: int, mesh: Mesh, seed: int, abstract: bool = False
) -> None:
    """Give `model` its projections, in the dtype of its parameters and split over `mesh` as
    `sharding` says; shapes alone where it is `abstract`. Nothing where the widths are equal."""
    width, dtype = model.config.hidden_size, model.norm.weight.dtype
    if width == teacher_width:
        return
    shape = (pairs, teacher_width, width)
    where = sharding.parameter_sharding(mesh, (None, "teacher_embed", "embed"), shape)
    weight = jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    if not abstract:
        start = start_projection(pairs, width=width, teacher=teacher_width, seed=seed)
        weight = jax.device_put(start.astype(jnp.dtype(dtype)), where)
    give_projection(model, weight)


def give_projection(model: Decoder, weight: jax.Array | jax.ShapeDtypeStruct) -> None:
    """The projections W [P,D',D], as a part of the model's parameters."""
    setattr(model, PROJECTION, Projection(weight))


def projection_of(model: Decoder) -> jax.Array | None:
    """W [P,D',D] of a model in a step, or None."""
    found = getattr(model, PROJECTION, None)
    return None if found is None else found.weight[...]


def without_projection(model: Decoder) -> Decoder:
    """The same model, its projections dropped: what is exported and evaluated."""
    if hasattr(model, PROJECTION):
        delattr(model, PROJECTION)
    return model
