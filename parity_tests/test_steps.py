"""Rung "steps": the same tiny float32 run on both backends, compared at every step.

Loss, learning rate, gradient norm, every parameter; two micro-batches a step, clipping, warm-up and
a falling schedule, rows in the cache's own order over more than one epoch. (Every optimizer under
every schedule, from given gradients: test_optimizer.)

Losses 1e-6, what has a gradient's conditioning (norm, masses) 1e-5; parameters by what rounding of
the gradients explains, see `ladder.Drift`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
from ladder import FP32, TIGHT, Drift, assert_drift, assert_numbers

import torch_ref.step
from jax_distill import hf
from jax_distill.batch import Batch
from jax_distill.cache import Cache
from jax_distill.config import LossConfig
from jax_distill.data import row_indices
from jax_distill.devices import QUICK_COMPILE
from jax_distill.training.optimizer import learning_rate_schedule, make_optimizer
from jax_distill.training.state import make_state
from jax_distill.training.step import make_train_step
from torch_ref import model as torch_model
from torch_ref import optimizer as torch_optimizer
from torch_ref.optimizer_test import state_by_name

LENGTH, ROWS, BATCH, MICRO, SEED = 32, 10, 4, 2, 7
RATE = dict(learning_rate=2e-3, final=1e-4, warmup_steps=3)
UPDATE = dict(b1=0.9, b2=0.95, weight_decay=0.1, clip_norm=0.5)
# From 128 on adafactor factors its second moment. Tied: one parameter, one update.
FACTORED = dict(hidden_size=128, intermediate_size=144, initializer_range=0.075)
SHAPES = {"adafactor": FACTORED | dict(tie_word_embeddings=True)}
LOSS = LossConfig(ce_weight=0.2, chunk_size=32)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Cache:
    place = tmp_path_factory.mktemp("cache")
    rows = tiny.rows_cache(place / "rows", tiny.packed_rows(ROWS, LENGTH))
    return tiny.taught_cache(place / "taught", rows, tiny.llama_folder(place / "teacher", seed=9))


def batch_of(cache: Cache, step: int) -> Batch:
    return cache.read(row_indices(step, batch_size=BATCH, num_rows=ROWS, seed=SEED))


def torch_run(folder, cache, name, steps, kind):
    """After each step: (metrics, parameters by HF name, how far apart they may be by now)."""
    model = torch_model.load_model(str(folder), dtype="float32")
    parameters = dict(model.named_parameters())
    schedule = torch_optimizer.learning_rate_schedule(kind, steps=steps, **RATE)
    options = {k: v for k, v in UPDATE.items() if k != "clip_norm"}
    optimizer = torch_optimizer.make_optimizer(name, parameters, **options)
    drifts = {key: Drift() for key in parameters}
    for step in range(steps):
        batch, task = batch_of(cache, step), tiny.torch_task(LOSS)
        gradients, sums = tiny.torch_gradients(model, batch, task, MICRO)
        norm = torch_optimizer.clip_gradients(model.parameters(), UPDATE["clip_norm"])
        metrics = torch_ref.step.means(torch_ref.step.StepSums(sums))
        metrics["gradient_norm"] = norm.item()
        metrics["learning_rate"] = schedule(step)
        torch_optimizer.set_learning_rate(optimizer, schedule(step))
        optimizer.step()
        found = {key: p.detach().numpy() for key, p in parameters.items()}
        add_to(drifts, optimizer, parameters, gradients, schedule(step))
        yield metrics, found, drifts


def add_to(drifts, optimizer, parameters, gradients, rate) -> None:
    """To the drift of every parameter, the step that the optimizer has just taken."""
    state = state_by_name(optimizer.state_dict())
    if not isinstance(optimizer, torch.optim.AdamW):
        return add_adafactor(drifts, state, parameters, gradients, rate)
    for key, drift in drifts.items():
        moments = state[key]["exp_avg"], state[key]["exp_avg_sq"]
        drift.adamw(*moments, parameters[key], rate, b1=UPDATE["b1"], b2=UPDATE["b2"])


def add_adafactor(drifts, state, parameters, gradients, rate) -> None:
    """u = g/r, r = √v or √(row·column / mean row): each root is a norm of the gradients so far, so
    moves by x·G at most where they move by x·G. Then u is divided by its own norm (rms) where that
    is above 1. Roundings of the sums: a few, FP32 of the update."""
    for names in torch_optimizer.stacks(list(gradients)):
        g, p = (
            torch.stack([x[name].detach() for name in names]).squeeze()
            for x in (gradients, parameters)
        )
        mine = state[names[0]]
        turned = 2 * mine["step"] ** 0.4  # v holds at least g²/step^0.8
        if "v" in mine:
            root = mine["v"].squeeze().sqrt()
            parts = [root]
        else:
            small, large = sorted(range(g.ndim), key=lambda axis: g.shape[axis])[-2:]
            row = mine["row"].squeeze().unsqueeze(large)
            column = mine["column"].squeeze().unsqueeze(small)
            parts = [row.sqrt(), column.sqrt(), row.mean(small, keepdim=True).sqrt()]
            root, turned = parts[0] * parts[1] / parts[2], np.inf
        largest = drifts[names[0]].largest(g)
        u = g.abs() / root
        moved = largest / root + u * largest * sum(1 / x for x in parts)
        norm = max(u.square().mean().sqrt(), 1.0)
        moved = (moved + u * moved.square().mean().sqrt() / norm) / norm
        scale = rate * p.square().mean().sqrt().clamp_min(torch_optimizer.SMALLEST_SCALE).item()
        rounding = 1.5 * np.finfo(np.float32).eps * p.abs() + FP32 * scale * u
        for index, name in enumerate(names):
            of_all = [x[index] if len(names) > 1 else x for x in (rounding, moved)]
            drifts[name].add(*(x.numpy() for x in of_all), scale=scale, turned=turned)


def jax_run(folder, cache, name, steps, kind):
    """The same of the JAX model, on one device."""
    model = hf.load_model(folder, param_dtype=jnp.float32, compute_dtype=jnp.float32)
    config = model.config
    schedule = learning_rate_schedule(kind, steps=steps, **RATE)
    optimizer = make_optimizer(name, schedule, **UPDATE)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes ints and floats
        graphdef, state = make_state(model, optimizer, tiny.one_device())
        train_step = make_train_step(graphdef, optimizer, schedule, tiny.jax_task(LOSS))
        program = None
        for step in range(steps):
            split = batch_of(cache, step).micro_batches(MICRO).map(jnp.asarray)
            if program is None:
                program = train_step.lower(state, split).compile(QUICK_COMPILE)
            state, metrics = program(state, split)
            yield {k: float(v) for k, v in metrics.items()}, tiny.by_hf_name(state.params, config)


@pytest.mark.parametrize("name,kind,steps", [("adamw", "cosine", 20), ("adafactor", "linear", 6)])
def test_every_step_of_a_run_is_the_same(cache, tmp_path, name, kind, steps):
    folder = tiny.llama_folder(tmp_path, **SHAPES.get(name, {}))
    runs = (run(folder, cache, name, steps, kind) for run in (jax_run, torch_run))
    for number, ((got, ours), (expected, theirs, drifts)) in enumerate(zip(*runs, strict=True), 1):
        rung = f"steps, {name}, step {number}"
        assert_numbers(rung, got, expected, 1e-5, **TIGHT)
        assert ours.keys() == theirs.keys()
        for key, parameter in theirs.items():
            assert_drift(rung, key, ours[key], parameter, drifts[key])
    before = dict(torch_model.load_model(str(folder), dtype="float32").named_parameters())
    assert all((before[key] != torch.tensor(theirs[key])).any() for key in theirs)
