"""The codec against its definition in float64, in numpy and in jax; the shift of labels."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jax_distill.losses  # noqa: F401  (registers the classes as pytrees)
from jax_distill.batch import ENCODED_FIELDS, Batch, EncodedTopK, TopK
from jax_distill.synthetic import exact_targets, loss_inputs

EPSILON = float(np.finfo(np.float32).eps)
TEMPERATURES = (1.0, 2.0, 0.5)


def random_logits(vocab_size: int = 40, scale: float = 4.0) -> np.ndarray:
    return np.random.default_rng(0).normal(0.0, scale, (3, 5, vocab_size))


def exact_encoding(
    logits: np.ndarray, *, top_k: int, temperatures: tuple[float, ...] = (1.0,)
) -> EncodedTopK:
    """Float64 logits [..,V] as a teacher's pass measures them, from the definition."""
    targets = [exact_targets(logits, top_k=top_k, temperature=tau) for tau in temperatures]
    largest = logits.max(axis=-1, keepdims=True)
    gaps = largest - np.take_along_axis(logits, targets[0].indices, axis=-1)
    log_z = [np.log(np.exp((logits - largest) / tau).sum(axis=-1)) for tau in temperatures]
    return EncodedTopK(
        indices=targets[0].indices,
        gaps=gaps.astype(np.float16),
        log_z=np.stack(log_z, axis=-1).astype(np.float32),
        log_tail=np.stack([each.log_tail for each in targets], axis=-1),
        count=targets[0].count.astype(np.uint16),
        temperatures=temperatures,
    )


def decoded(encoded: EncodedTopK, temperature: float, how: str) -> TopK:
    """By numpy, by jax, or by jax under jit, as numpy arrays."""
    if how == "numpy":
        return encoded.decode(temperature)
    decode = jax.jit(lambda e: e.decode(temperature)) if how == "jit" else None
    on_device = jax.tree.map(jax.numpy.asarray, encoded)
    found = decode(on_device) if decode else on_device.decode(temperature)
    return found.map(np.asarray)


@pytest.mark.parametrize("how", ["numpy", "jax", "jit"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("top_k", [1, 7, 40])
def test_decoding_gives_the_log_probabilities_of_the_teacher(top_k, temperature, how):
    """K = V too, where the tail is −inf. A float16 gap g is off by 2⁻¹¹·g at most; the common shift
    that puts the sum right is a mean of such errors; fp32 rounds each of four steps."""
    encoded = exact_encoding(random_logits(), top_k=top_k, temperatures=TEMPERATURES)
    wanted = exact_targets(random_logits(), top_k=top_k, temperature=temperature)
    got = decoded(encoded, temperature, how)
    assert got.temperature == temperature and got.top_k == top_k
    for name in ("indices", "logprobs", "log_tail", "count"):
        assert getattr(got, name).dtype == getattr(wanted, name).dtype, name
    np.testing.assert_array_equal(got.indices, wanted.indices)
    np.testing.assert_array_equal(got.log_tail, wanted.log_tail)
    of_gaps = 2 * 2.0**-11 * np.abs(encoded.gaps.astype(np.float64)).max() / temperature
    rounding = 4 * EPSILON * (1.0 + np.abs(wanted.logprobs).max())
    np.testing.assert_allclose(got.logprobs, wanted.logprobs, rtol=0, atol=of_gaps + rounding)


@pytest.mark.parametrize("how", ["numpy", "jax", "jit"])
def test_what_is_decoded_sums_to_one_with_its_tail(how):
    """To fp32: the error of each log p, of size |log p|·ε/2 or the shift's, enters times p."""
    encoded = exact_encoding(random_logits(), top_k=7, temperatures=TEMPERATURES)
    for temperature in TEMPERATURES:
        got = decoded(encoded, temperature, how)
        total = np.exp(np.float64(got.logprobs)).sum(-1) + np.exp(np.float64(got.log_tail))
        np.testing.assert_allclose(total, 1.0, rtol=0, atol=8 * EPSILON)


def test_numpy_and_jax_decode_alike():
    encoded = exact_encoding(random_logits(), top_k=7, temperatures=TEMPERATURES)
    for temperature in TEMPERATURES:
        ours, theirs = (decoded(encoded, temperature, how) for how in ("numpy", "jit"))
        atol = 4 * EPSILON * (1.0 + np.abs(ours.logprobs).max())
        np.testing.assert_allclose(theirs.logprobs, ours.logprobs, rtol=0, atol=atol)


@pytest.mark.parametrize("how", ["numpy", "jit"])
def test_positions_without_entries_have_all_probability_in_the_tail(how):
    """Padding: count 0, log_tail 0; whatever the gaps. And a count below K: the rest is −inf."""
    encoded = exact_encoding(random_logits(), top_k=7)
    count, tail, gaps = encoded.count.copy(), encoded.log_tail.copy(), encoded.gaps.copy()
    count[0], tail[0], gaps[0] = 0, 0.0, np.nan
    count[1] = 3
    gaps[1, :, 3:] = np.nan
    got = decoded(replace(encoded, count=count, log_tail=tail, gaps=gaps), 1.0, how)
    assert np.all(got.logprobs[0] == -np.inf) and not got.log_tail[0].any()
    assert np.all(got.logprobs[1, :, 3:] == -np.inf)
    total = np.exp(np.float64(got.logprobs[1])).sum(-1) + np.exp(np.float64(got.log_tail[1]))
    np.testing.assert_allclose(total, 1.0, rtol=0, atol=8 * EPSILON)


@pytest.mark.parametrize("how", ["numpy", "jit"])
def test_entries_beside_a_tail_of_everything_have_no_probability(how):
    encoded = exact_encoding(random_logits(), top_k=7)
    everything = replace(encoded, log_tail=np.zeros_like(encoded.log_tail))
    got = decoded(everything, 1.0, how)
    assert np.all(got.logprobs == -np.inf) and not np.any(got.log_tail)


@pytest.mark.parametrize("how", ["numpy", "jit"])
def test_a_tail_of_almost_everything_or_almost_nothing_keeps_its_digits(how):
    """Σ p = 1 − p_tail from a p_tail of 1 − 1e-5 and of 1e-9; log(1 − e^x) loses none of ε but what
    x itself rounds: near 0, ε/2·|x| of |x|."""
    encoded = exact_encoding(random_logits(), top_k=7)
    for log_tail in (np.float32(-1e-5), np.float32(np.log(1e-9))):
        tail = np.full_like(encoded.log_tail, log_tail)
        got = decoded(replace(encoded, log_tail=tail), 1.0, how)
        total = np.exp(np.float64(got.logprobs)).sum(-1)
        size = 1.0 + np.abs(got.logprobs).max()
        np.testing.assert_allclose(total, -np.expm1(np.float64(log_tail)), rtol=8 * EPSILON * size)


def test_a_temperature_that_was_not_measured_is_refused():
    encoded = exact_encoding(random_logits(), top_k=7, temperatures=(1.0, 2.0))
    with pytest.raises(ValueError, match=r"temperature of \[1.0, 2.0\], got 3.0; "):
        encoded.decode(3.0)


@pytest.mark.parametrize("in_jax", [False, True])
@pytest.mark.parametrize("short_counts", [False, True])
@pytest.mark.parametrize("top_k", [1, 4, 7, 9])
def test_the_first_entries_are_those_of_a_smaller_k(top_k, short_counts, in_jax):
    """What is dropped joins the tail; beyond the count stands NaN, which is not read."""
    inputs = dict(rows=2, length=5, width=6, vocab_size=30, seed=1)
    seven = loss_inputs(**inputs, top_k=7, short_counts=short_counts).batch.targets
    if in_jax:
        seven = jax.tree.map(jax.numpy.asarray, seven)
    got = seven.first(top_k).map(np.asarray)
    assert got.top_k == min(top_k, 7)
    np.testing.assert_array_equal(got.count, np.minimum(seven.count, top_k))
    real = np.arange(got.top_k) < got.count[..., None]
    assert np.all(got.logprobs[~real] == -np.inf)
    p = np.exp(np.float64(np.where(real, got.logprobs, -np.inf))).sum(-1)
    np.testing.assert_allclose(p + np.exp(np.float64(got.log_tail)), 1.0, rtol=0, atol=8 * EPSILON)
    if not short_counts and top_k <= 7:
        few = loss_inputs(**inputs, top_k=top_k).batch.targets
        np.testing.assert_array_equal(got.indices, few.indices)
        np.testing.assert_array_equal(got.logprobs, few.logprobs)
        bound = 4 * EPSILON * (1.0 + np.abs(few.log_tail))
        assert np.all(np.abs(got.log_tail - few.log_tail) <= bound)


def test_the_first_of_all_tokens_have_a_tail_again():
    """K = V has the tail −inf; cut to 3 it is what was cut, cut to V it stays −inf."""
    whole = exact_targets(random_logits(9), top_k=9)
    assert np.all(whole.first(9).log_tail == -np.inf)
    wanted = np.log(np.exp(np.float64(whole.logprobs[..., 3:])).sum(-1))
    np.testing.assert_allclose(whole.first(3).log_tail, wanted, rtol=4 * EPSILON)


def rows_of(length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(0, 50, (4, length), np.int32),
        "segment_ids": np.ones((4, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (4, 1)),
        "loss_mask": np.ones((4, length), np.uint8),
    }


@pytest.mark.parametrize("length", [1, 2, 6])
def test_a_position_predicts_the_next_token_and_the_last_counts_for_nothing(length):
    rows = rows_of(length)
    batch = Batch.from_rows(rows)
    np.testing.assert_array_equal(batch.labels[:, :-1], rows["tokens"][:, 1:])
    assert batch.mask.dtype == bool and batch.labels.dtype == np.int32
    assert np.all(batch.mask[:, :-1]) and not batch.mask[:, -1].any()
    assert not batch.labels[:, -1].any()
    assert np.all(rows["loss_mask"] == 1)  # the caller's stay as they were


def test_micro_batches_keep_the_rows_in_order():
    batch = Batch.from_rows(
        rows_of(6), loss_inputs(4, 6, width=3, vocab_size=9, top_k=2).batch.targets
    )
    micro = batch.micro_batches(2)
    assert micro.targets.indices.shape == (2, 2, 6, 2) and micro.mask.shape == (2, 2, 6)
    assert micro.targets.temperature == 1.0
    for before, after in zip(jax.tree.leaves(batch), jax.tree.leaves(micro), strict=True):
        np.testing.assert_array_equal(before, after.reshape(before.shape))
    with pytest.raises(ValueError, match="reshape"):
        batch.micro_batches(3)


def test_encoded_targets_go_through_their_arrays_and_back():
    encoded = exact_encoding(random_logits(), top_k=7, temperatures=TEMPERATURES)
    arrays = encoded.arrays()
    assert list(arrays) == [f"teacher_{name}" for name in ENCODED_FIELDS]
    back = EncodedTopK.from_arrays({"tokens": np.zeros(3)} | arrays, TEMPERATURES)
    assert back.temperatures == TEMPERATURES
    for name in ENCODED_FIELDS:
        assert getattr(back, name) is getattr(encoded, name)


def test_batches_are_pytrees_whose_temperature_is_static():
    batch = Batch.from_rows(rows_of(3))
    assert len(jax.tree.leaves(batch)) == 5  # no targets
    one = exact_targets(random_logits(), top_k=2)
    two = replace(one, temperature=2.0)
    assert jax.tree.structure(one) != jax.tree.structure(two)
    assert jax.tree.map(lambda x: x[:1], two).temperature == 2.0
    doubled = Batch(batch.labels, batch.mask, one).map(lambda x: np.concatenate([x, x]))
    assert doubled.targets.count.shape == (6, 5) and doubled.tokens is None
