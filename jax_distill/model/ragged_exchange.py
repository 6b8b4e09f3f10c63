"""The rows of an `expert` group exchanged by a ragged all-to-all: only to devices that want them.

`jax.lax.ragged_all_to_all` runs on GPUs alone; this was compiled for them, and run only with that
one call replaced by gathers. At top-4 of 32 experts on 8 devices a device wants 1 − (28 choose 4) /
(32 choose 4) = 43 % of the group's rows, where the all-gather brings it all. The buffers are as
large: nothing is dropped, so they must hold all rows.

Letters: N tokens of a device, k experts of each, e devices of a group, S = N·min(k, e) rows to
send at most, A numbers of a row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Sizes = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


class Route(NamedTuple):
    """What goes where from one device, under shard_map.

    order: int32 [S], the token of each row to send, by destination. slots: int32 [e,N], where a
    token's row for a destination stands in it; S where it is not wanted there. there, back: of the
    group, offsets and sizes as `ragged_all_to_all` takes them.
    """

    order: jax.Array
    slots: jax.Array
    there: Sizes
    back: Sizes


def make_route(experts: jax.Array, count: int, group: str) -> Route:
    """Of tokens with experts int32 [N,k], of which each device of the mesh axis has `count`."""
    tokens, top_k = experts.shape
    devices, own = jax.lax.axis_size(group), jax.lax.axis_index(group)
    destination = jnp.arange(devices, dtype=jnp.int32)[:, None, None]
    wanted = jnp.any(experts[None] // jnp.int32(count) == destination, axis=-1)
    order = jnp.argsort(~wanted.reshape(-1), stable=True).astype(jnp.int32)
    room = tokens * min(top_k, devices)
    slots = jnp.cumsum(wanted.reshape(-1), dtype=jnp.int32).reshape(wanted.shape) - 1
    sent = jax.lax.all_gather(jnp.sum(wanted, axis=1, dtype=jnp.int32), group)  # [from, to]
    begins = jnp.cumsum(sent, axis=1) - sent  # in the rows of who sends
    arrives = jnp.cumsum(sent, axis=0) - sent  # in the rows of who gets
    return Route(
        order=order[:room] % tokens,
        slots=jnp.where(wanted, slots, room),
        there=(begins[own], sent[own], arrives[own], sent[:, own]),
        back=(arrives[:, own], sent[:, own], begins[:, own], sent[own]),
    )


def send_rows(x: jax.Array, route: Route, group: str, fill: int = 0) -> jax.Array:
    """[N,A] → [e·N,A], the group's rows that this device wants, by sender; `fill` after them."""
    devices = route.slots.shape[0]
    room = jnp.full((devices * x.shape[0], *x.shape[1:]), fill, x.dtype)
    return jax.lax.ragged_all_to_all(x[route.order], room, *route.there, axis_name=group)


def return_rows(rows: jax.Array, route: Route, group: str) -> jax.Array:
    """[e·N,A] → [N,A], the sum of what the destinations made of a token, in fp32 and in their
    order: the transpose of `send_rows`."""
    room = jnp.zeros((route.order.size, *rows.shape[1:]), rows.dtype)
    found = jax.lax.ragged_all_to_all(rows, room, *route.back, axis_name=group)
    wide = jnp.float64 if rows.dtype == jnp.float64 else jnp.float32
    total = jnp.zeros((route.slots.shape[1], *rows.shape[1:]), wide)
    for slots in route.slots:
        total += found.at[slots].get(mode="fill", fill_value=0).astype(wide)
    return total.astype(rows.dtype)


def _transposed(forward, backward):
    """`forward` with `backward` as its gradient; (rows, route, group)."""
    function = jax.custom_vjp(
        lambda rows, route, group: forward(rows, route, group), nondiff_argnums=(2,)
    )
    function.defvjp(
        lambda rows, route, group: (forward(rows, route, group), route),
        lambda group, route, d_rows: (backward(d_rows, route, group), None),
    )
    return function


send, give_back = _transposed(send_rows, return_rows), _transposed(return_rows, send_rows)
