"""The planner for GPUs that are not here: with jax's CUDA plugin, and without."""

import dataclasses
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_distill import devices, plan, sharding, student
from jax_distill.attention import backward_workspace
from jax_distill.base.errors import UserError
from jax_distill.config import load
from jax_distill.model import count_parameters
from jax_distill.model.experts import ExpertWeights, Gate, mix_experts
from jax_distill.plan import program, target
from jax_distill.plan_test import PER_TOKEN, write_configuration
from jax_distill.training import program as training_program
from jax_distill.training.inputs import READ_AHEAD

pytestmark = pytest.mark.usefixtures("optax_promotion")
PLUGIN = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_cuda13_plugin")
needs_plugin = pytest.mark.skipif(
    not PLUGIN, reason="needs jax's CUDA plugin: pip install 'jax_distill[plan]'"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    return write_configuration(tmp_path_factory.mktemp("plan"))


def needs_cudnn() -> None:
    pytest.importorskip("nvidia.cudnn", reason="needs cuDNN's wheel: jax_distill[plan]")


@needs_plugin
def test_a_step_is_planned_for_an_h200(file, monkeypatch):
    needs_cudnn()
    config = load(["--config", file, "--train.compute_dtype=bfloat16"])
    seen, memory_of = [], devices.memory_of
    monkeypatch.setattr(devices, "memory_of", lambda c: seen.append(memory_of(c)) or seen[-1])
    found = plan.main(config, device="h200")
    (memory,) = seen
    parameters = count_parameters(student.planned_architecture(config).model)
    assert found.parts["parameters"] == 4 * parameters
    assert found.parts["optimizer_state"] == 2 * 4 * parameters + 3 * 4
    assert found.parts["cache_batch"] == (1 + READ_AHEAD) * 8 * 64 * PER_TOKEN
    temporary = found.parts["gradients"] + found.parts["loss_chunk"]
    assert 0 < temporary <= memory.temps
    workspace = backward_workspace(rows=8, length=64, heads=8, head_dim=8)
    assert found.parts["cudnn_workspace"] == workspace
    assert found.peak_bytes == memory.peak + READ_AHEAD * 8 * 64 * PER_TOKEN + workspace
    assert found.margin_bytes == found.pool_bytes - found.reserve_bytes - found.peak_bytes
    temporary += found.parts["activations_and_temps"]
    assert memory.temps <= temporary <= memory.temps + 4096  # the metrics, and what holds them
    assert found.device == "NVIDIA H200" and found.attention == "cudnn"
    assert sum(found.parts.values()) == found.peak_bytes and min(found.parts.values()) >= 0
    assert found.parts["gradients"] > 0 and found.phases
    assert found.pool_bytes == int(0.75 * found.device_bytes)
    lasting = found.parts["parameters"] + found.parts["optimizer_state"]
    batch = found.parts["cache_batch"] // (1 + READ_AHEAD)
    assert found.argument_bytes == lasting + batch
    tokens, length, layers = 8 * 64, 64, 3
    linears = layers * (4 * 32 * 64 + 3 * 32 * 48)
    attention = layers * 9 * 64 * length  # two causal matmuls, recomputed, and five backward
    counted = tokens * (8 * linears + 6 * 520 * 32 + attention)
    assert found.xla_flops_per_step == pytest.approx(counted, rel=0.02)


@needs_plugin
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_offloaded_moments_are_on_the_host_alone(file, layerwise, count, monkeypatch):
    """They are arguments there, updated in place; the device holds a slice of them at a time."""
    needs_cudnn()
    options = ["--train.compute_dtype=bfloat16", "--mesh.data=1", f"--mesh.fsdp={count}"]
    options += ["--optimizer.offload=moments", f"--optimizer.layerwise={layerwise}"]
    config = load(["--config", file, *options, "--optimizer.clip_norm=null"])
    stats, memory_of = [], devices.memory_of
    remember = lambda c: stats.append(c.memory_analysis()) or memory_of(c)  # noqa: E731
    monkeypatch.setattr(devices, "memory_of", remember)
    found = plan.main(config, device="h200", devices=count)
    parameters = count_parameters(student.planned_architecture(config).model)
    whole = found.parts["parameters"]
    assert found.parts["optimizer_state"] == 3 * 4  # counters
    assert found.host_bytes["moments"] == 2 * whole * count >= 8 * parameters
    assert found.host_bytes["checkpoint"] == count * (3 * whole + 2 * 4)
    (program,) = stats
    assert program.host_argument_size_in_bytes == program.host_alias_size_in_bytes == 2 * whole
    assert program.host_temp_size_in_bytes == 0
    assert sum(found.parts.values()) == found.peak_bytes


@needs_plugin
def test_a_step_is_planned_for_eight_h200s_that_split_it(file):
    needs_cudnn()
    options = ["--train.compute_dtype=bfloat16", "--mesh.data=1", "--mesh.fsdp=8"]
    options += ["--train.batch_size=32", "--train.micro_batch_size=16"]
    config = load(["--config", file, *options])
    found = plan.main(config, device="h200", devices=8)
    assert found.devices == 8 and found.attention == "cudnn"
    assert sum(found.parts.values()) == found.peak_bytes and min(found.parts.values()) >= 0
    parameters = count_parameters(student.planned_architecture(config).model)
    assert found.parts["parameters"] == pytest.approx(4 * parameters / 8, rel=0.03)  # norms: whole
    assert found.parts["optimizer_state"] == pytest.approx(8 * parameters / 8, rel=0.03)
    assert found.parts["cache_batch"] == (1 + READ_AHEAD) * 4 * 64 * PER_TOKEN  # a device's rows
    # Of the two rows that a device has of a micro-batch.
    assert found.parts["cudnn_workspace"] == backward_workspace(2, 64, heads=8, head_dim=8)
    assert found.parts["gradients"] > 0 and found.phases
    # Parameters are gathered for the matmuls, gradients are summed.
    assert {"all-gather"} < set(found.collectives)
    gathered = found.collectives["all-gather"]
    assert gathered["count"] > 0 and gathered["bytes"] > 2 * parameters / 8


@needs_plugin
def test_the_teacher_is_planned_for_an_h200(file):
    needs_cudnn()
    config = load(["--config", file, "--teacher.dtype=bfloat16"])
    found = plan.main(config, device="h200", step="teacher")
    assert found.attention == "cudnn" and sum(found.parts.values()) == found.peak_bytes
    parameters = count_parameters(student.planned_architecture(config).model)  # the same model
    assert found.parts["parameters"] == 2 * parameters
    assert found.parts["gradients"] == found.parts["optimizer_state"] == 0
    assert found.parts["cudnn_workspace"] == 0  # the forward needs none
    assert set(found.phases) == {"forward", "loss"}
    assert max(found.phases.values()) <= found.peak_bytes
    temporary = found.phases["loss"] - found.parts["parameters"] - found.parts["cache_batch"]
    assert 0 < temporary < 4 * 8 * 64 * 520  # never all the logits


PROMISED = {
    "dense": (["--loss.implementation=dense"], 78.3),  # the paper's, measured
    "forward_chunked": (["--loss.implementation=forward_chunked"], 61.8),  # the paper's
    "fused": ([], 58.3),  # the paper's fused_chunked
    "layerwise": (["--optimizer.layerwise=true", "--optimizer.clip_norm=null"], 50.0),
    "fused at 32K": (["--data.sequence_length=32768"], 65.0),
}


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize("case", PROMISED)
def test_the_promised_peaks_hold_for_an_h200(case):
    """GB, the 3.2B student at 8K, one row a step: what README.md and PAPER.md set out to beat."""
    needs_cudnn()
    options, most = PROMISED[case]
    config = load(
        ["--config", "configs/llama31_8b_to_3b_8k.yaml", "--train.batch_size=1", *options]
    )
    found = plan.main(config, device="h200")
    assert found.attention == "cudnn" and found.fits
    assert found.peak_bytes / 1e9 < most
    workspace = 0.81 if "32K" in case else 0.20  # GB, as cuDNN 9.28 answers
    assert found.parts["cudnn_workspace"] / 1e9 == pytest.approx(workspace, abs=0.005)


def test_without_cudnn_its_attention_is_not_planned(file, monkeypatch):
    find_spec = importlib.util.find_spec

    def without(name, *more):
        if name == "nvidia":
            return SimpleNamespace()
        return None if name == "nvidia.cudnn" else find_spec(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setattr(training_program, "default_attention", lambda *_, **__: "cudnn")
    here = target.find_target("cpu", 1)
    config, gpu = load(["--config", file]), dataclasses.replace(here, name="a GPU", planned=True)
    line = r"cuDNN's library .* a GPU, got none; run pip install 'jax_distill\[plan\]'"
    with pytest.raises(UserError, match=line):
        program.make_program(config, gpu, "train")
    target.need_cudnn(here)  # of a card that is here, JAX says so itself


@needs_plugin
@pytest.mark.parametrize("key", list(devices.GPUS))
def test_every_card_compiles(key):
    planned = devices.planned_devices(devices.find_gpu(key), 2)
    mesh = sharding.make_mesh(data=2, fsdp=1, devices=planned)
    split = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=split)
    compiled = devices.compile_ahead(jax.jit(lambda x: (x @ x.T).sum()), x, planned=True)
    assert devices.memory_of(compiled).arguments == 64 * 64 * 2 // 2


@needs_plugin
def test_the_ragged_exchange_of_experts_compiles():
    """Forward and backward, each with the rows there and their sums back."""
    planned = devices.planned_devices(devices.find_gpu("h200"), 4)
    mesh = sharding.make_mesh(data=1, expert=4, devices=planned)
    rows = sharding.batch_sharding(mesh)

    def shape(*sizes, dtype=jnp.bfloat16):
        split = rows if sizes[0] == 256 else NamedSharding(mesh, PartitionSpec("expert"))
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=split)

    def total(x, weights, parameters, experts):
        mixed = mix_experts(
            x,
            experts,
            weights,
            parameters,
            gate=Gate(1.7, 7.0),
            row_sharding=rows,
            implementation="ragged",
        )
        return jnp.sum(mixed.astype(jnp.float32))

    own = ExpertWeights(shape(8, 64, 64), shape(8, 64), shape(8, 32, 64), shape(8, 64))
    inputs = (shape(256, 64), shape(256, 2, dtype=jnp.float32), own)
    compiled = devices.compile_ahead(
        jax.jit(jax.grad(total, argnums=(0, 1, 2))),
        *inputs,
        shape(256, 2, dtype=jnp.int32),
        planned=True,
    )
    text = compiled.as_text()
    assert "ragged-all-to-all" in text and " all-to-all" not in text


@pytest.mark.skipif(bool(PLUGIN), reason="jax's CUDA plugin is installed")
def test_without_the_plugin_there_is_one_line(file):
    words = [sys.executable, "-m", "jax_distill.plan", "--config", file, "--device", "h200"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pip install 'jax_distill[plan]'" in done.stderr
