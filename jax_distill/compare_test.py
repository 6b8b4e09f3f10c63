"""Two caches beside each other: the KL from its definition, and what cannot be compared."""

from dataclasses import replace

import numpy as np
import pytest

from jax_distill import audit
from jax_distill.base.errors import UserError
from jax_distill.cache import Cache
from jax_distill.cache_test import cache_of, captured, log_softmax, small
from jax_distill.compare import compare, outcome_kl, sentence
from jax_distill.synthetic import exact_targets, rounding, shortened


def merged_kl(ours, theirs, p, q):
    """One position, from the definition: probabilities [V] float64 → the KL of those in both ids
    [K] and the rest as one outcome."""
    both = np.intersect1d(ours, theirs)
    rest_p, rest_q = (np.delete(x, both).sum() for x in (p, q))
    kl = (p[both] * np.log(p[both] / q[both])).sum()
    return kl + (rest_p * np.log(rest_p / rest_q) if rest_p else 0)


@pytest.mark.parametrize("other_k", [3, 9, 40])
def test_the_kl_is_that_of_the_outcomes_which_both_tell_apart(other_k):
    """Also of fewer real ids than K, and of another K; at K = V it is the teachers' own."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (60, 40))
    others = logits + rng.normal(0, 1, logits.shape)
    p, q = (np.exp(log_softmax(z, 1.0)) for z in (logits, others))
    ours, theirs = exact_targets(logits, top_k=other_k), exact_targets(others, top_k=other_k)
    if other_k < 40:
        ours = exact_targets(logits, top_k=8)
        theirs = shortened(theirs, rng.integers(1, other_k + 1, 60))
    found = outcome_kl(ours, theirs, 40)
    expected = [
        merged_kl(ours.indices[i], theirs.indices[i, : theirs.count[i]], p[i], q[i])
        for i in range(60)
    ]
    # log p and log q are fp32, of sizes up to 20; the KL's terms weigh them by p.
    np.testing.assert_allclose(found, expected, atol=2 * rounding("float32", 1, 20))
    whole = (p * np.log(p / q)).sum(-1)
    assert (found < whole + 1e-5).all() and found.min() > 0
    if other_k == 40:
        np.testing.assert_allclose(found, whole, atol=2 * rounding("float32", 1, 20))


def other_cache(path, of: Cache, arrays, logits, **fields) -> Cache:
    manifest = replace(of.manifest, teacher_fingerprint="another", **fields)
    return cache_of(path, manifest, arrays | captured(logits, manifest.top_k))


def test_audit_says_how_far_two_caches_are_apart(tmp_path, capsys):
    cache, arrays, logits = small(tmp_path / "a")
    noisy = logits + np.random.default_rng(3).normal(0, 0.4, logits.shape).astype(np.float32)
    other = other_cache(tmp_path / "b", cache, arrays, noisy)
    rows = np.arange(cache.rows)
    found, itself = compare(cache, other, rows), compare(cache, cache, rows)
    assert found.temperature == 1.0 and len(found.kl) == cache.read(rows).mask.sum()
    assert not itself.kl.any() and itself.same_first.all()
    assert 1e-4 < found.kl.mean() < 0.1 and 0.5 < found.same_first.mean() < 1
    assert audit.main([cache.path, "--compare", other.path]) == 0
    assert sentence(found, other.path) in capsys.readouterr().out.replace("\n", " ")


def test_what_cannot_be_compared_is_refused_by_name(tmp_path):
    cache, arrays, logits = small(tmp_path / "a")
    rows = np.arange(cache.rows)
    tokens = arrays["tokens"].copy()
    tokens[3, 0] += 1
    moved = other_cache(tmp_path / "moved", cache, arrays | {"tokens": tokens}, logits)
    with pytest.raises(UserError, match="the same tokens in both caches, got others in row 3 of"):
        compare(cache, moved, rows)
    shorter, *_ = small(tmp_path / "shorter", rows=9)
    with pytest.raises(UserError, match="10 of 12 tokens in .* and 9 of 12"):
        compare(cache, shorter, rows)
    bare, *_ = small(tmp_path / "bare", top_k=0)
    with pytest.raises(
        UserError, match="most likely ids in both caches .*got rows alone in .*bare"
    ):
        compare(cache, bare, rows)
    arrays |= captured(logits, 5, (4.0,))
    hot = cache_of(tmp_path / "hot", replace(cache.manifest, temperatures=(4.0,)), arrays)
    with pytest.raises(UserError, match=r"temperature that both caches have, got \[1.0, 2.0\] and"):
        compare(cache, hot, rows)
