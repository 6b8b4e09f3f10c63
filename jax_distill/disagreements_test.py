"""The positions of largest KL against a search of all of them, over batches of a cache."""

import numpy as np
import pytest

from jax_distill import evaluate
from jax_distill.disagreements import CONTEXT_TOKENS, TOKENS, Disagreements, print_disagreements
from jax_distill.losses.float64_test import log_softmax
from jax_distill.samples import Words
from jax_distill.teacher_test import (
    VOCAB,
    hidden_states,
    manifest,
    random_model,
    single_rows,
    write,
)

LENGTH, COUNT = 24, 20


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Ten rows of one document each; ids are their own text."""
    folder = tmp_path_factory.mktemp("cache")
    return write(folder / "c", single_rows(10, LENGTH, seed=3), random_model(0), manifest(LENGTH))


def test_the_furthest_positions_are_those_of_a_search_in_float64(cache, capsys):
    """Batches of 4, the last one padded; head rows beyond the vocabulary do not count."""
    models = {"teacher": random_model(0), "a": random_model(1), "b": random_model(0)}
    rows = np.arange(1, 10)
    collected = Disagreements(Words(None), cache, count=COUNT)
    students = {name: models[name] for name in "ab"}
    evaluate.test_table(
        models["teacher"], students, cache, rows,
        batch_size=4, chunk_size=16, disagreements=collected,
    )  # fmt: skip
    batch = cache.read(rows, targets=False)

    def log_q(name: str) -> np.ndarray:
        hidden = hidden_states(models[name], batch).astype(np.float64)
        head = np.asarray(models[name].lm_head_weight(), np.float64)
        return log_softmax((hidden @ head.T)[..., :VOCAB])

    log_p, log_a = log_q("teacher"), log_q("a")
    kl = np.where(batch.mask, (np.exp(log_p) * (log_p - log_a)).sum(axis=-1), 0.0)
    order = np.argsort(-kl, axis=None)[:COUNT]
    found = collected.found()
    assert len(found["a"]) == COUNT and not found["b"]
    assert max(each["position"] for each in found["a"]) >= CONTEXT_TOKENS
    for entry, where in zip(found["a"], order, strict=True):
        index, position = np.unravel_index(where, kl.shape)
        assert (entry["row"], entry["position"]) == (rows[index], position)
        assert entry["kl"] == pytest.approx(kl[index, position], rel=1e-4)
        first = max(position + 1 - CONTEXT_TOKENS, 0)
        seen = batch.tokens[index, first : position + 1]
        assert entry["context"] == " ".join(map(str, seen))
        assert entry["next"] == str(batch.tokens[index, position + 1])
        for name, values in (("teacher", log_p), ("student", log_a)):
            best = np.argsort(-values[index, position])[:TOKENS]
            assert [text for text, _ in entry[name]] == [str(x) for x in best]
            shown = [p for _, p in entry[name]]
            np.testing.assert_allclose(shown, np.exp(values[index, position, best]), rtol=1e-4)
    print_disagreements(found)
    assert f"{found['a'][0]['kl']:.2f} nats after" in capsys.readouterr().out
