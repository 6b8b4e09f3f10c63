"""Moments in the host's pinned memory (`optimizer.offload: moments`): where they are, and the way
to the device and back inside the step.

An array's type says that it is on the host (its sharding's memory kind is `pinned_host`, which a
CPU device has too), so nothing else needs to know of it. The update reads one slice (a layer of the
stack, or whole leaves), updates it, and writes it back in place; XLA makes copies of a slice of
pinned memory out of that, also in a loop, and keeps no second stack on either side.

Compiled for an H200, a loop over 28 layers of one fp32 stack [28,4096,4096]: 0.13 GB on the device
and nothing new on the host. Whole leaves at once: all of them on the device together, unless a
barrier makes each wait for the one before it.
"""

import math
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, Sharding

from jax_distill.base.errors import UserError
from jax_distill.base.process import available_memory

HOST = "pinned_host"
Tree = TypeVar("Tree")


class PlannedHost(NamedSharding):
    """A sharding in the pinned memory of devices that are not here: JAX drops the memory kind
    there, since such a device does not say which memories it has."""

    @property
    def memory_kind(self) -> str:
        return HOST

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, PlannedHost)
        return same and (self.mesh, self.spec) == (other.mesh, other.spec)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.mesh, self.spec, HOST))


def on_host(sharding: Sharding) -> NamedSharding:
    """The same sharding, in the pinned memory of the devices' hosts."""
    assert isinstance(sharding, NamedSharding), "a parameter's is, on a mesh"
    found = sharding.with_memory_kind(HOST)
    return found if found.memory_kind else PlannedHost(sharding.mesh, sharding.spec)


def as_output(sharding: NamedSharding) -> NamedSharding:
    """What a jitted function's `out_shardings` take for `sharding`: of a planned device JAX checks
    that the kind it dropped is not there."""
    if isinstance(sharding, PlannedHost):
        return NamedSharding(sharding.mesh, sharding.spec)
    return sharding


def is_on_host(x: Any) -> bool:
    """Whether an array, or a shape with a sharding, is in the host's memory; inside jit too."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def offloaded(opt_state: Any) -> bool:
    """Whether some of it is in the host's memory."""
    return any(map(is_on_host, jax.tree.leaves(opt_state)))


def fetched(tree: Tree) -> Tree:
    """The leaves that are on the host copied to the device; inside jit."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, tree
    )


def returned(tree: Tree, like: Tree) -> Tree:
    """Leaves on the device copied to the host where the leaf of `like` is there; inside jit."""
    return jax.tree.map(
        lambda x, old: jax.device_put(x, jax.memory.Space.Host) if is_on_host(old) else x,
        tree,
        like,
    )


def copied(tree: Tree) -> Tree:
    """The leaves on the host as copies of their own: numpy would look at the memory itself, which
    the next step overwrites while a checkpoint is being written."""
    return jax.tree.map(
        lambda x: jax.device_put(x, x.sharding, may_alias=False) if is_on_host(x) else x, tree
    )


def process_bytes(tree: Any) -> int:
    """Bytes that a tree of shapes with shardings takes, on all devices of this process."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape))
        * leaf.dtype.itemsize
        * (len(leaf.sharding.addressable_devices) or len(leaf.sharding.device_set))
        for leaf in jax.tree.leaves(tree)
    )


def host_bytes(params: Any, opt_state: Any) -> dict[str, int]:
    """What one process takes of the host's memory for a state of these shapes, by name; empty
    where nothing is offloaded.

    moments: pinned. checkpoint: parameters and optimizer state on their way to the disk.
    """
    moments = process_bytes([leaf for leaf in jax.tree.leaves(opt_state) if is_on_host(leaf)])
    if not moments:
        return {}
    return {"moments": moments, "checkpoint": process_bytes((params, opt_state))}


def check_host_memory(params: Any, opt_state: Any) -> None:
    """Refuse to offload what the host cannot hold.

    Raises:
        UserError: names what is needed and what is free.
    """
    need, free = host_bytes(params, opt_state), available_memory()
    if sum(need.values()) > free:
        parts = " + ".join(f"{size / 1e9:.3g} of {name}" for name, size in need.items())
        raise UserError(
            f"expected {sum(need.values()) / 1e9:.3g} GB of free host memory for optimizer.offload "
            f"({parts}), got {free / 1e9:.3g}; set optimizer.state_dtype bfloat16, or "
            "optimizer.offload none"
        )
