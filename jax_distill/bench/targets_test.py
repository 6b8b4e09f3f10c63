"""The bench of targets: little is lost where the K are nearly all; more draws lose less."""

from jax_distill.bench import targets
from jax_distill.teacher_test import manifest, random_model, single_rows, write


def test_more_ids_and_more_draws_bring_the_gradient_nearer_to_the_whole_one(tmp_path, monkeypatch):
    for name, few in {"SIZES": (4, 290), "REACH": (), "SAMPLES": (4, 400)}.items():
        monkeypatch.setattr(targets, name, few)
    monkeypatch.setattr(targets, "TAILS", ("bucket",))
    cache = write(tmp_path / "c", single_rows(8, 12), None, manifest(12, top_k=0, temperatures=()))
    full, *rest = targets.measure(random_model(), random_model(1), cache)
    by = {name: (ids, kl, error) for name, _, ids, kl, error in rest}
    assert full[4] == 0 and len(by) == 4
    _, kl, error = by["K 290"]
    assert abs(kl - full[3]) < 1e-2 * full[3] and error < 0.05 < by["K 4"][2]
    assert by["K 4"][1] < full[3]  # the bucket is a lower bound
    assert by["4 draws"][2] > 3 * by["400 draws"][2]
