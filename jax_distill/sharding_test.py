"""The table of logical axes: what is split over which mesh axes, and what stays whole."""

import jax
import pytest
from jax.sharding import PartitionSpec

from jax_distill import sharding
from jax_distill.base.errors import UserError


def mesh(data: int, fsdp: int):
    return sharding.make_mesh(data=data, fsdp=fsdp, devices=jax.devices()[: data * fsdp])


@pytest.mark.parametrize(
    "axes,shape,expected",
    [
        (("layers", "heads", "embed"), (3, 32, 16), (None, "fsdp", None)),
        (("layers", "embed", "mlp"), (3, 16, 48), (None, None, "fsdp")),
        (("vocab", "embed"), (64, 16), ("fsdp", None)),
        (("vocab", "embed"), (61, 16), (None, None)),  # 4 does not divide 61
        (("heads", "mlp"), (32, 48), ("fsdp", None)),  # a mesh axis splits one dimension
        (("layers", None), (3, 16), (None, None)),
    ],
)
def test_a_parameter_is_split_by_its_logical_axes(axes, shape, expected):
    split = sharding.parameter_sharding(mesh(2, 4), axes, shape)
    assert split.is_equivalent_to(
        jax.sharding.NamedSharding(split.mesh, PartitionSpec(*expected)), len(shape)
    )


def test_a_logical_axis_may_be_split_over_several_mesh_axes(monkeypatch):
    monkeypatch.setitem(sharding.LOGICAL_AXES, "mlp", ("data", "fsdp"))
    split = sharding.parameter_sharding(mesh(2, 4), ("mlp", "vocab"), (16, 64))
    assert split.shard_shape((16, 64)) == (2, 64)
    # As many of them as divide it.
    assert sharding.parameter_sharding(mesh(2, 4), ("mlp",), (12,)).shard_shape((12,)) == (6,)


def test_rows_are_split_over_data_and_fsdp():
    assert sharding.row_shards(mesh(2, 4)) == 8
    assert sharding.batch_sharding(mesh(2, 4), leading=1).shard_shape((3, 16, 5)) == (3, 2, 5)
    with pytest.raises(UserError, match="multiple of the 8 devices .*got 12; .* 16"):
        sharding.check_rows(mesh(2, 4), 12, "train.batch_size")
