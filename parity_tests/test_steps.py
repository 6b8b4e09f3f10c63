"""Rung "steps": the same tiny float32 run on both backends, compared at every step.

Loss, learning rate, gradient norm, every parameter; two micro-batches a step, clipping, warm-up and
a falling schedule, rows in the store's own order over more than one epoch. (Every optimizer under
every schedule, from given gradients: test_optimizer.)

Losses 1e-6, what has a gradient's conditioning (norm, masses) 1e-5. Gradients agree to 1e-5 of the
largest entry G of their tensor (test_gradients), and Adam moves an entry by lr·m̂/√v̂ whatever its
gradient's size; so a step may add lr · 1e-5·G/√v̂ to the difference of an entry, which is much only
where the entry's own gradients are next to nothing. On average over a tensor, 2e-6 of the learning
rates so far. (Adafactor: 1e-3 of them everywhere.)
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
from ladder import TIGHT, assert_close, assert_numbers

import torch_ref.step
from jax_distill import hf
from jax_distill.cache import Store
from jax_distill.config import LossConfig
from jax_distill.data import row_indices
from jax_distill.optimizer import learning_rate_schedule, make_optimizer
from jax_distill.step import make_state, make_train_step
from torch_ref import model as torch_model
from torch_ref import optimizer as torch_optimizer

LENGTH, ROWS, BATCH, MICRO, SEED = 32, 10, 4, 2, 7
RATE = dict(learning_rate=2e-3, final=1e-4, warmup_steps=3)
UPDATE = dict(b1=0.9, b2=0.95, weight_decay=0.1, clip_norm=0.5)
# From 128 on adafactor factors its second moment. Tied: one parameter, one update.
FACTORED = dict(hidden_size=128, intermediate_size=144, initializer_range=0.075)
SHAPES = {"adafactor": FACTORED | dict(tie_word_embeddings=True)}
LOSS = LossConfig(ce_weight=0.2, chunk_size=16)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    place = tmp_path_factory.mktemp("store")
    rows = tiny.rows_store(place / "rows", tiny.packed_rows(ROWS, LENGTH))
    return tiny.taught_store(place / "taught", rows, tiny.llama_folder(place / "teacher", seed=9))


def batch_of(store: Store, step: int) -> dict[str, np.ndarray]:
    return store.read(row_indices(step, batch_size=BATCH, num_rows=ROWS, seed=SEED))


def torch_run(folder, store, name, steps, kind):
    """After each step: (metrics, parameters by HF name, what each entry may now differ by more)."""
    model = torch_model.load_model(str(folder), dtype="float32")
    parameters = dict(model.named_parameters())
    schedule = torch_optimizer.learning_rate_schedule(kind, steps=steps, **RATE)
    optimizer = torch_optimizer.Optimizer(name, parameters, **UPDATE)
    for step in range(steps):
        gradients, sums = torch_ref.step.batch_gradients(
            model,
            batch_of(store, step),
            micro_batch_size=MICRO,
            loss=LOSS,
            vocab_size=tiny.WORDS,
            compute_dtype=torch.float32,
        )
        metrics = torch_ref.step.means(sums)
        metrics["gradient_norm"] = torch_optimizer.global_norm(gradients).item()
        metrics["learning_rate"] = schedule(step)
        optimizer.step(gradients, schedule(step))
        found = {key: p.detach().numpy() for key, p in parameters.items()}
        yield metrics, found, allowed_of(optimizer, gradients, schedule(step))


def allowed_of(optimizer, gradients, rate) -> dict[str, np.ndarray | float]:
    """See the head of the file: by parameter, what a step may add to a difference."""
    if optimizer.name != "adamw":
        return dict.fromkeys(gradients, 1e-3 * rate)
    allowed = {}
    for key, g in gradients.items():
        root = (optimizer.state[key]["v"] / (1 - optimizer.b2**optimizer.count)).sqrt() + 1e-8
        factor = torch.clamp_max(UPDATE["clip_norm"] / torch_optimizer.global_norm(gradients), 1.0)
        share = 1e-5 * factor * g.abs().max() / root
        allowed[key] = rate * share.clamp_max(2.0).numpy()
    return allowed


def jax_run(folder, store, name, steps, kind):
    """The same of the JAX model, on one device."""
    model = hf.load_model(folder, param_dtype=jnp.float32, compute_dtype=jnp.float32)
    config = model.config
    schedule = learning_rate_schedule(kind, steps=steps, **RATE)
    optimizer = make_optimizer(name, schedule, **UPDATE)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes ints and floats
        graphdef, state = make_state(model, optimizer, tiny.one_device())
        train_step = make_train_step(
            graphdef, optimizer, schedule, loss=LOSS, vocab_size=tiny.WORDS
        )
        program = None
        for step in range(steps):
            batch = batch_of(store, step)
            split = {
                k: jnp.asarray(v.reshape(-1, MICRO, LENGTH, *v.shape[2:])) for k, v in batch.items()
            }
            if program is None:
                program = train_step.lower(state, split).compile(tiny.QUICK_COMPILE)
            state, metrics = program(state, split)
            yield {k: float(v) for k, v in metrics.items()}, tiny.by_hf_name(state.params, config)


@pytest.mark.parametrize("name,kind,steps", [("adamw", "cosine", 20), ("adafactor", "linear", 6)])
def test_every_step_of_a_run_is_the_same(store, tmp_path, name, kind, steps):
    folder = tiny.llama_folder(tmp_path, **SHAPES.get(name, {}))
    moved, allowed = 0.0, {}
    runs = (run(folder, store, name, steps, kind) for run in (jax_run, torch_run))
    for number, ((got, ours), (expected, theirs, more)) in enumerate(zip(*runs, strict=True), 1):
        rung = f"steps, {name}, step {number}"
        assert_numbers(rung, got, expected, 1e-5, **TIGHT)
        moved += expected["learning_rate"]
        assert ours.keys() == theirs.keys()
        for key, parameter in theirs.items():
            allowed[key] = allowed.get(key, 2e-7) + more[key]
            unit = allowed[key]
            mean = 2e-6 * moved / np.mean(unit)
            assert_close(rung, key, ours[key], parameter, 1.0, unit=unit, mean=mean)
    before = dict(torch_model.load_model(str(folder), dtype="float32").named_parameters())
    assert all((before[key] != torch.tensor(theirs[key])).any() for key in theirs)
