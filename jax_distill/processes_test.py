"""Several processes' agreement: what it is in a single one. Real ones: processes_kill_test.py."""

import pytest

from jax_distill import processes
from jax_distill.base.console import console
from jax_distill.base.errors import UserError


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
