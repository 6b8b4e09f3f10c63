"""Several processes' agreement: what it is in a single one, and who does what. Real ones:
several_processes_test.py."""

import socket
import subprocess
import sys

import numpy as np
import pytest

from jax_distill import processes
from jax_distill.base.console import console
from jax_distill.base.errors import UserError
from jax_distill.sharding import RowShare, share_of
from jax_distill.teacher.rows import KnownRows
from jax_distill.teacher.writing import Work


def test_one_process_is_the_first_and_talks_and_waits_for_nobody():
    with processes.started(coordinator_address=""):
        assert processes.is_primary_process() and not processes.is_several()
        assert processes.from_primary(lambda: [1, "a"]) == [1, "a"]
        processes.wait_for_all()
        assert not console.quiet


def test_auto_outside_of_a_cluster_is_refused(monkeypatch):
    for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    with pytest.raises(UserError, match="expected a cluster that says which process this is"):
        with processes.started(coordinator_address="auto"):
            pass


WAITING = """
import sys
from jax_distill import processes
with processes.started(coordinator_address=sys.argv[1], num_processes=2,
                       process_id=int(sys.argv[2]), join_seconds=1):
    print("joined")
"""


def test_processes_that_do_not_find_each_other_end_with_the_address():
    """The second one alone, which no one answers, and the first one alone, which no one joins."""

    def free_address() -> str:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            return f"localhost:{free.getsockname()[1]}"

    addresses = [free_address(), free_address()]
    waiting = [
        subprocess.Popen(
            [sys.executable, "-c", WAITING, address, str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, address in enumerate(addresses)
    ]
    said = [each.communicate()[0] for each in waiting]
    assert [each.returncode for each in waiting] == [1, 1], said
    for line, address, got in zip(
        said, addresses, ("fewer than 2", "no answer there"), strict=True
    ):
        assert line.startswith(f"failed: expected all processes at {address} within 1 s"), line
        assert got in line and line.count("\n") == 1


def test_processes_share_rows_by_their_devices():
    assert [share_of({0: {0, 1}, 1: {2, 3}}, each) for each in (0, 1)] == [
        RowShare(0, 2, True),
        RowShare(1, 2, True),
    ]
    by_two = {0: {0}, 1: {0}, 2: {1}, 3: {1}}  # two hold the same rows: tensor goes over both
    assert [share_of(by_two, each) for each in range(4)] == [
        RowShare(0, 2, True),
        RowShare(0, 2, False),
        RowShare(1, 2, True),
        RowShare(1, 2, False),
    ]
    for holds in ({0: {0, 1}, 1: {1, 2}}, {0: {0, 1}, 1: {2}}):
        with pytest.raises(UserError, match="2 processes to hold equal parts of the rows"):
            share_of(holds, 0)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_missing_shards_are_shared_out_and_all_run_as_many_batches(parts):
    """Of 63 rows in shards of 10, two of which are there."""
    arrays = {"tokens": np.arange(63 * 2, dtype=np.int32).reshape(63, 2)}
    committed = {1, 4}
    shares = [RowShare(number, parts, True) for number in range(parts)]
    every = [
        Work(KnownRows.of(arrays, 10), committed, share, shard_rows=10, batch_size=4)
        for share in shares
    ]
    found = [list(work.own_shards()) for work in every]
    own = [shard for turns in found for shard, _ in turns if shard is not None]
    assert sorted(shard.number for shard in own) == [0, 2, 3, 5, 6]
    for shard in own:
        first = 10 * shard.number
        assert shard.first_row == first
        np.testing.assert_array_equal(shard.arrays["tokens"], arrays["tokens"][first : first + 10])
    batches = [[count for _, count in turns] for turns in found]
    assert all(each == batches[0] for each in batches)
    for turns in found:
        assert all(shard is None or shard.rows <= 4 * count for shard, count in turns)
    # Of the 43 rows that are missing it is taken that the last shard alone is short.
    assert all(abs(work.expected_batches - sum(batches[0])) <= 1 for work in every)
