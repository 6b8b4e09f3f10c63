"""The real SmolLM2 up to the loss: the 100 ids that each backend would store, and the loss of one
batch, a student that lacks six layers against the whole model's targets.

float32 throughout. After thirty layers the two backends' log-probabilities differ by up to 2e-4
(test_smollm2); the loss is a mean of many and keeps its 1e-6.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
from flax import nnx
from test_smollm2 import documentation_ids, folder  # noqa: F401  (fixtures)

import torch_ref.step
import torch_ref.teacher
from jax_distill import hf, step, student, teacher
from jax_distill.cache import Store, create
from jax_distill.config import LossConfig
from torch_ref import model as torch_model

TOP_K, LENGTH = 100, 256
KEPT = [*range(12), *range(18, 30)]


@pytest.fixture(scope="module")
def rows(documentation_ids):  # noqa: F811
    """512 tokens as two rows of one document each."""
    tokens = documentation_ids.reshape(2, LENGTH)
    mask = np.ones(tokens.shape, np.uint8)
    mask[:, -1] = 0
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    return {
        "tokens": tokens,
        "segment_ids": np.ones_like(tokens),
        "positions": positions,
        "loss_mask": mask,
    }


@pytest.fixture(scope="module")
def captured(folder, rows):  # noqa: F811
    """The arrays of a store as (torch, JAX) make them."""
    manifest = dataclasses.replace(
        tiny.manifest(LENGTH), vocab_size=49152, top_k=TOP_K, temperatures=(1.0,)
    )
    model = torch_model.load_model(str(folder), dtype="float32")
    ours = torch_ref.teacher.capture(model, rows, manifest, chunk_size=128)
    theirs = jax.jit(
        lambda m, rows: teacher.topk_targets(
            m.hidden_states(rows["tokens"], rows["segment_ids"], rows["positions"]),
            m.lm_head_weight(),
            vocab_size=49152,
            top_k=TOP_K,
            temperatures=(1.0,),
            chunk_size=128,
        )
    )(hf.load_model(folder), {k: jnp.asarray(v) for k, v in rows.items()})
    return manifest, ours, {k: np.asarray(v) for k, v in theirs.items()}


def test_both_backends_would_store_the_same_hundred(captured):
    _, ours, theirs = captured
    gap = theirs["gaps"].astype(np.float32)
    same = ours["teacher_indices"] == theirs["indices"]
    # Neighbours that stand closer than the backends' rounding, 2e-4 and a float16 step, may swap.
    near = np.zeros(same.shape, bool)
    step_size = 2e-4 + np.spacing(theirs["gaps"]).astype(np.float32)
    near[..., 1:] = np.diff(gap, axis=-1) <= step_size[..., 1:]
    near[..., :-1] |= near[..., 1:]
    near[..., -1] = True
    assert (same | near).all()
    assert same.mean() > 0.98
    difference = np.abs(ours["teacher_gaps"].astype(np.float32) - gap)
    assert (difference <= step_size).all()
    for name in ("log_z", "log_tail"):
        assert np.abs(ours[f"teacher_{name}"] - theirs[name]).max() <= 2e-4
    assert (np.abs(ours["teacher_log_tail"] - theirs["log_tail"])).mean() <= 2e-5


def test_the_loss_of_one_batch_is_the_same(captured, rows, folder, tmp_path):  # noqa: F811
    manifest, ours, _ = captured
    with create(str(tmp_path / "store"), manifest, 2) as writer:
        arrays = {name: array for name, array in ours.items() if name != "finite"} | rows
        writer.write(0, arrays)
    batch = Store.open(str(tmp_path / "store")).read([0, 1])
    start = student.make_student(folder, tmp_path / "student", layers=KEPT, parameters=None)
    loss = LossConfig(ce_weight=0.3, chunk_size=100)
    model = torch_model.load_model(str(start), dtype="float32")
    with torch.no_grad():
        knobs = dict(loss=loss, vocab_size=49152, compute_dtype=torch.float32)
        expected = torch_ref.step.means(torch_ref.step.loss_sums(model, batch, **knobs))
    del model
    graphdef, params = nnx.split(hf.load_model(start))
    sums = jax.jit(
        lambda params, batch: step.loss_fn(params, graphdef, batch, loss=loss, vocab_size=49152)[1]
    )(params, batch)
    got = {k: float(v) for k, v in step.means(sums).items()}
    assert 0.5 < expected["kl"] < 1.5
    for name in ("loss", "kl", "cross_entropy"):
        assert got[name] == pytest.approx(expected[name], rel=1e-6), name
