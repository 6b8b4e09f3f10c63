"""The same run on every mesh: losses and parameters to fp32 rounding, weights read into their
shards, a checkpoint of one mesh resumed on another."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest

from jax_distill import distil, hf, sharding
from jax_distill.config import Config
from jax_distill.devices import QUICK_COMPILE
from jax_distill.hf import weights
from jax_distill.hf_test import write_folder
from jax_distill.training.checkpoint import Checkpoints
from jax_distill.training.program import make_programs
from jax_distill.training.state import TrainState, make_state
from jax_distill.training.step_test import uneven_batch

pytestmark = pytest.mark.usefixtures("optax_promotion")

MESHES = {
    "1": {},
    "fsdp 8": {"fsdp": 8},
    "tensor 2 x fsdp 4": {"tensor": 2, "fsdp": 4},
    "expert 4 x fsdp 2": {"expert": 4, "fsdp": 2},
    "2 x 2 x 2": {"fsdp": 2, "expert": 2, "tensor": 2},
}
COMMON = {
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "gpt_oss": COMMON
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 3,
        "attention_bias": True,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_scaling": None,
    },
}
STEPS, SAVED = 3, 2
BATCH = uneven_batch([16, 9, 16, 3, 12, 16, 1, 7])


def configured(folder, mesh: dict[str, int]) -> Config:
    devices, router_weight = {"data": 1} | mesh, 0.1 if folder.name == "gpt_oss" else 0.0
    return dataclasses.replace(
        Config(),
        student=dataclasses.replace(Config().student, path=str(folder)),
        loss=dataclasses.replace(
            Config().loss, chunk_size=10, ce_weight=0.5, router_weight=router_weight
        ),
        optimizer=dataclasses.replace(Config().optimizer, name="sgd", learning_rate=0.1),
        train=dataclasses.replace(
            Config().train, param_dtype="float32", compute_dtype="float32", remat="layer"
        ),
        mesh=dataclasses.replace(Config().mesh, **devices),
    )


class Run:
    """A few steps of one model on one mesh, beginning with the weights of its folder."""

    def __init__(self, folder, mesh: dict[str, int]) -> None:
        config = configured(folder, mesh)
        size = int(np.prod(list(mesh.values())))
        where = sharding.make_mesh(**config.mesh.axes, devices=jax.devices()[:size])
        model = distil.load_on_mesh(folder, config, where)
        sizes = {"steps": STEPS, "vocab_size": 300, "teacher_vocab_size": 300}
        made = make_programs(config, model, where, **sizes, teacher=None)
        self.shapes, self.start = made.shapes, make_state(model, made.optimizer, where)[1]
        self.batch = sharding.shard_batch(where, BATCH.micro_batches(8), leading=1)
        self.step = made.train_step.lower(self.start, self.batch, None).compile(QUICK_COMPILE)

    def go(self, state: TrainState, steps: int) -> tuple[TrainState, list[dict[str, float]]]:
        numbers = []
        for _ in range(steps):
            state, values = self.step(state, self.batch, None)
            numbers.append({name: float(value) for name, value in values.items()})
        return state, numbers


def model_folder(folder, raw: dict[str, Any]):
    """Weights of deviation 0.3; norms about 1."""
    rng, tensors = np.random.default_rng(0), {}
    for key, slot in hf.weight_table(hf.model_config(raw)).items():
        values = 0.3 * rng.normal(size=slot.shape) + ("norm" in key)
        tensors[key] = values.astype(np.float32)
    return write_folder(folder, raw, tensors)


def assert_close(got: Any, expected: Any, start: Any) -> None:
    """What a run changed, to 2e-5 of the leaf's largest change: sums of some hundred terms in
    another order (1e-6), three steps deep; and a rounding of the parameter."""
    got, expected = jax.device_get((got, expected))
    for left, right, first in zip(*map(jax.tree.leaves, (got, expected, start)), strict=True):
        largest = np.abs(right - first).max()
        assert largest > 0
        np.testing.assert_allclose(left, right, rtol=3e-7, atol=2e-5 * largest + 1e-8)


@pytest.mark.parametrize("family", MODELS)
def test_every_mesh_makes_the_same_run(tmp_path, family):
    """And a checkpoint of one resumes on others. 5 compilations a family take most of the time."""
    folder = model_folder(tmp_path / family, MODELS[family])
    runs = {name: Run(folder, mesh) for name, mesh in MESHES.items()}
    first = jax.device_get(runs["1"].start.params)
    end, expected = runs["1"].go(runs["1"].start, STEPS)
    saved = Checkpoints(tmp_path / "checkpoints", keep=1, seed=0)
    for name, run in list(runs.items())[1:]:
        split = [leaf.sharding == of.sharding for leaf, of in leaves(run.start, run.shapes)]
        assert all(split)
        assert all(
            np.array_equal(*pair) for pair in leaves(jax.device_get(run.start.params), first)
        )
        state, numbers = run.go(run.start, SAVED)
        if name == "expert 4 x fsdp 2":
            saved.save(SAVED, state.params, state.opt_state)
        state, more = run.go(state, STEPS - SAVED)
        for got, wanted in zip(numbers + more, expected, strict=True):
            assert got == pytest.approx(wanted, rel=2e-5, abs=1e-6), name
        assert_close(state.params, end.params, first)
    with saved:
        for name in ("1", "2 x 2 x 2"):
            run = runs[name]
            like = {"params": run.shapes.params, "opt_state": run.shapes.opt_state}
            found = saved.restore(SAVED, **like)
            step = jax.device_put(np.int32(SAVED), run.shapes.step.sharding)
            state, _ = run.go(TrainState(step=step, **found), STEPS - SAVED)
            assert_close(state.params, end.params, first)
    text = runs["tensor 2 x fsdp 4"].step.as_text()
    assert_the_loss_stays_split(text)


def leaves(*trees: Any) -> Any:
    return zip(*map(jax.tree.leaves, trees), strict=True)


def assert_the_loss_stays_split(text: str) -> None:
    """tensor 2 x fsdp 4, a chunk of [2,5] tokens, K = 5 of them and a label, D = 16: over `tensor`
    go per-token numbers and the gradient of hidden; nothing is gathered but half the head, once."""
    found = re.findall(r"= (\S+|\(.*?\)) (all-\S+|reduce-scatter\S*)\(.*?op_name=\"(\S*)\"", text)
    of_loss = [(shape, kind, name) for shape, kind, name in found if "/jvp(loss)/" in name]
    inside = {
        dims
        for shape, _, name in of_loss
        if "while/body" in name
        for dims in re.findall(r"\[([\d,]+)\]", shape)
    }
    assert inside and inside <= {"2,5", "2,5,6", "2,5,16"}
    gathered = [(shape.split("{")[0], name) for shape, kind, name in of_loss if "gather" in kind]
    assert [shape for shape, _ in gathered] == ["f32[160,16]"]
    assert "while/body" not in gathered[0][1]


def test_a_device_reads_its_own_part_of_a_tensor(tmp_path, monkeypatch):
    """Weights come from the files straight to their shards: no tensor that is split is read whole,
    and the parts together are read once."""
    folder, read = model_folder(tmp_path / "model", MODELS["gpt_oss"]), dict[str, list[int]]()

    def counting(path, key, cut):
        part = read_slice(path, key, cut)
        read.setdefault(key, []).append(part.size)
        return part

    read_slice = weights.read_slice
    monkeypatch.setattr(weights, "read_slice", counting)
    config = configured(folder, MESHES["2 x 2 x 2"])
    mesh = sharding.make_mesh(**config.mesh.axes)
    distil.load_on_mesh(folder, config, mesh)
    layer = "model.layers.0."
    assert read["lm_head.weight"] == [320 * 16 // 8] * 8
    assert read[layer + "self_attn.q_proj.weight"] == [64 * 16 // 8] * 8
    assert read[layer + "mlp.experts.down_proj"] == [8 * 32 * 16 // 8] * 8
    assert read[layer + "input_layernorm.weight"] == [16]
