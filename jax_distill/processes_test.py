"""Several processes' agreement: what it is in a single one, and who does what. Real ones:
several_processes_test.py."""

import socket
import subprocess
import sys

import pytest

from jax_distill import processes
from jax_distill.base.console import console
from jax_distill.base.errors import UserError
from jax_distill.sharding import RowShare, share_of
from jax_distill.teacher.writing import own_work


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
    missing = [(0, 0, 9), (2, 20, 29), (3, 30, 39), (5, 50, 59), (6, 60, 62)]
    shares = [RowShare(number, parts, True) for number in range(parts)]
    found = [own_work(missing, share, 4, rows=63) for share in shares]
    own = [shard for work, _ in found for shard in work if shard[0] >= 0]
    assert sorted(own) == missing
    for work, total in found:
        assert total == sum(-(-(last + 1 - first) // 4) for _, first, last in work)
