"""Several processes as one program: `jax.distributed`, and what they have to agree on.

Every process runs the same stages on its own devices' part of the arrays. The first one
(`is_primary_process`) talks, writes the run folder, exports and reports; the others wait for what
it decides (`from_primary`). In a single process all of this is the identity.
"""

import atexit
import contextlib
import functools
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_distill.base.console import Stopped, console
from jax_distill.base.errors import RunError, UserError, one_line

T = TypeVar("T")
LONG = 24 * 3600 * 1000
"""How long a process waits for another, ms: a dead one ends the wait by its missing heartbeat."""
_numbers = itertools.count()


def is_several() -> bool:
    """Whether `started` has joined this process to others."""
    return jax.distributed.is_initialized()


def is_primary_process() -> bool:
    """Whether this process talks, reports, exports and writes the run folder: the first one does,
    and a single one."""
    return not is_several() or jax.process_index() == 0


@contextlib.contextmanager
def started(
    *,
    coordinator_address: str,
    num_processes: int | None = None,
    process_id: int | None = None,
    heartbeat_seconds: int = 60,
    join_seconds: int = 120,
) -> Iterator[None]:
    """Join the other processes, before any use of a backend; all but the first are silent.

    Arguments: `MeshConfig`'s. Where one of the first three is left out, the cluster says it
    (Slurm, Open MPI, Kubernetes), and a process has one of its host's devices; where all are
    given, it has all that it sees. No address: nothing happens.

    Where not all have come after `join_seconds`, those that wait end: one line, exit code 1.

    A process that fails ends at once, without waiting for the others: they end after
    `heartbeat_seconds`, which is also how long they wait for each other at the end.

    Raises:
        UserError: no cluster that says what is left out.
        RunError: the others cannot be reached; one is lost.
    """
    if not coordinator_address:
        yield
        return
    known = None not in (num_processes, process_id) and coordinator_address != "auto"
    # Its handler of SIGTERM would replace ours.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        with _at_most(join_seconds):
            jax.distributed.initialize(
                None if coordinator_address == "auto" else coordinator_address,
                num_processes,
                process_id,
                cluster_detection_method="deactivate" if known else None,
                # Its own end of the wait is an abort without our words: it never comes to that.
                initialization_timeout=10 * join_seconds,
                # Less, since the service takes a while to see it and to say so to the others.
                heartbeat_timeout_seconds=max(1, heartbeat_seconds * 4 // 5),
                shutdown_timeout_seconds=heartbeat_seconds,
            )
    except (ValueError, TypeError) as error:
        raise UserError(
            "expected a cluster that says which process this is (Slurm, Open MPI, Kubernetes), got "
            f"none: {one_line(error)}; set mesh.coordinator_address, mesh.num_processes and "
            "mesh.process_id"
        ) from error
    except RuntimeError as error:
        raise RunError(
            f"expected to join the other processes at {coordinator_address}, got: "
            f"{one_line(error)}; check that address, and that all of them are started"
        ) from error
    console.quiet = not is_primary_process()
    try:
        yield
    except Stopped:  # by all, together
        raise
    except BaseException as error:
        atexit.register(_leave, 2 if isinstance(error, UserError) else 1)
        if not _is_of_others(error):
            raise
        raise _lost(error, heartbeat_seconds) from None


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """End this process where the block takes longer. Only a thread can: the block is C++."""

    done = threading.Event()

    def end() -> None:
        line = _missing(seconds)
        if not done.is_set():
            print(f"failed: {line}", file=sys.stderr)
            _leave(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        done.set()
        timer.cancel()


def _missing(seconds: float) -> str:
    """Why the processes have not found each other, in one line that names the address."""
    state = _state()
    address = state.coordinator_address or "what the cluster says"
    line = f"expected all processes at {address} within {seconds:g} s (mesh.join_seconds), got "
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        return line + (
            f"no answer there: {one_line(error)}; check that mesh.coordinator_address is the first "
            "process's host and a port that no firewall closes, and that it is started"
        )
    return line + (
        f"fewer than {state.num_processes}; check that all are started, each with its own "
        "mesh.process_id, and look at the logs of those that have ended"
    )


def _leave(code: int) -> None:
    """JAX's own way out waits for the others, who may be waiting for this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_of_others(error: BaseException) -> bool:
    """Whether it is what a collective raises that lacks a process (on CPUs, a ValueError)."""
    return isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)


def _lost(error: BaseException, heartbeat_seconds: int) -> RunError:
    """The failure of a collective, once the runtime has had the time to say which process is lost
    (it does so by ending this one)."""
    line = f"process {jax.process_index()}: {one_line(error)[:300]}"
    print(f"{line}; the runtime will name the process that is lost", file=sys.stderr, flush=True)
    time.sleep(heartbeat_seconds)
    return RunError(f"{line}; see the other processes' logs, and re-run the same command to resume")


def _state() -> Any:
    # JAX has no public way to its coordination service; Orbax takes the same one. A collective
    # would do for values, but on CPUs it gives up on a process that is 30 s late.
    from jax._src import distributed

    return distributed.global_state


def _client() -> Any:
    return _state().client


def from_primary(make: Callable[[], T]) -> T:
    """What `make` returns in the first process (a JSON value), in all of them. Every process must
    call it, in the same order. A UserError or RunError of the first is raised in all."""
    if not is_several():
        return make()
    key, client = f"jax_distill/{next(_numbers)}", _client()
    if is_primary_process():
        try:
            value = make()
        except (UserError, RunError) as error:
            kind = "user" if isinstance(error, UserError) else "run"
            client.key_value_set(key, json.dumps({kind: str(error)}))
            raise
        client.key_value_set(key, json.dumps({"value": value}))
        return value
    found = json.loads(client.blocking_key_value_get(key, LONG))
    if "value" not in found:
        raise UserError(found["user"]) if "user" in found else RunError(found["run"])
    return found["value"]


def primary_first(make: Callable[[], T]) -> T:
    """What `make` returns, called by the first process, and by the others once it has returned
    there: it may leave files that they find."""
    made: list[T] = []
    from_primary(lambda: made.append(make()))
    return made[0] if made else make()


class StopVotes:
    """Whether the loop stops after a step: the name of the signal that has come, or "". Of several
    processes a signal to any of them stops all after the same step."""

    def __init__(self) -> None:
        self._before: jax.Array | None = None

    def after_step(self, received: str) -> str:
        """Call once a step. Of several, what had come a step ago: so much is known without waiting
        for the devices."""
        if not is_several():
            return received
        before, self._before = self._before, _largest(received)
        return "" if before is None else _name(before)

    def at_end(self, received: str) -> str:
        """What has come by now."""
        return _name(_largest(received)) if is_several() else received


@functools.cache
def _maximum() -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """How a number a device is split, and the largest of them."""
    everywhere = Mesh(np.array(jax.devices()), ("device",))
    program = jax.jit(jnp.max, out_shardings=NamedSharding(everywhere, PartitionSpec()))
    return NamedSharding(everywhere, PartitionSpec("device")), program


def _largest(received: str) -> jax.Array:
    """The largest number of the signals named by all processes, 0 for ""; on its way."""
    number = int(signal.Signals[received]) if received else 0
    split, maximum = _maximum()
    own = np.full(jax.local_device_count(), number, np.int32)
    return maximum(jax.make_array_from_process_local_data(split, own))


def _name(number: jax.Array) -> str:
    value = int(np.asarray(number))
    return signal.Signals(value).name if value else ""


def wait_for_all() -> None:
    """Return once every process has come here."""
    if is_several():
        _client().wait_at_barrier(f"jax_distill/{next(_numbers)}", LONG)
