"""The batch's classes as JAX pytrees: their arrays are leaves, temperatures are static."""

import dataclasses

import jax

from jax_distill.batch import Batch, EncodedTopK, LiveTeacher, TopK


def _register(cls: type, *static: str) -> None:
    names = [each.name for each in dataclasses.fields(cls)]
    data = [name for name in names if name not in static]
    jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=list(static))


_register(TopK, "temperature")
_register(LiveTeacher, "temperature")
_register(EncodedTopK, "temperatures")
_register(Batch)
