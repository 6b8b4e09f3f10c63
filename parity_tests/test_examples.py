"""The PyTorch scripts of the documentation, run as they stand; the cache's reader without JAX."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from jax_distill.cache import Cache
from jax_distill.losses.examples_test import (
    LENGTH,
    ROWS,
    VOCAB,
    assert_documents_apart,
    example,
    runs,
    write_packed_cache,
)
from jax_distill.objective import Objective
from torch_ref.losses import Head, loss
from torch_ref.model import hidden_states

ROOT = Path(__file__).parent.parent
BLOCKED = "jax jaxlib flax optax orbax grain transformers tokenizers matplotlib".split()
TRAINER = "LOSS_IN_YOUR_MODEL.md"


def write_student(path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The names of the Trainer's script after it has run, and the student it began with."""
    folder = tmp_path_factory.mktemp("trainer")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_student(Path("runs/quickstart/export"))
        names = runs(example(TRAINER, "Trainer"), folder)
        return names, AutoModelForCausalLM.from_pretrained("runs/quickstart/export")


def test_the_trainer_takes_the_mean_over_the_targets_of_a_whole_step(trained):
    names, student = trained
    history = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
    assert len(history) == 20 and history[-1] < history[0]
    # Two micro-batches of two rows are all four rows, in any order.
    batch = names["cache"].read(range(ROWS)).map(torch.from_numpy)
    counts = batch.mask.sum(-1)
    assert len(set(counts.tolist())) == ROWS
    hidden = hidden_states(student, batch.tokens, batch.segment_ids, batch.positions)
    sums = loss(hidden, Head(student.lm_head.weight), batch, Objective(ce_weight=0.3))
    # float32 sums of at most ROWS·LENGTH terms, in another order
    assert history[0] == pytest.approx((sums.loss / sums.count).item(), rel=ROWS * LENGTH * 2**-23)


def test_the_trainers_mask_keeps_packed_documents_apart(trained):
    names, _ = trained
    model, batch = names["model"].eval(), names["collate"](list(range(ROWS)))["batch"]

    @torch.no_grad()
    def hidden_of(tokens):
        return names["hidden_states"](model, replace(batch, tokens=torch.from_numpy(tokens)))

    assert_documents_apart(hidden_of, batch.tokens.numpy())
    ours = hidden_states(model, batch.tokens, batch.segment_ids, batch.positions)
    torch.testing.assert_close(names["hidden_states"](model, batch), ours)


def run_without(blocked: list[str], script: str, folder: Path) -> str:
    """Its output, in a process where importing any of `blocked` raises ImportError."""
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", block + script],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_a_cache_is_read_without_any_framework(tmp_path):
    write_packed_cache(tmp_path / "cache")
    script = "from jax_distill.cache import Cache\nprint(Cache.open('cache').read([1]).labels[0])"
    labels = Cache.open(str(tmp_path / "cache")).read([1]).labels[0]
    assert run_without([*BLOCKED, "torch"], script, tmp_path).strip() == str(labels)


def test_the_torch_dataset_of_a_cache_needs_no_jax(tmp_path):
    write_packed_cache(tmp_path / "runs/quickstart/cache/train")
    script = example("CACHE.md", "Dataset") + (
        "import pickle\n"
        "whole = rows.cache.read(range(len(rows)), temperature=1.0)\n"
        "for each in (rows, pickle.loads(pickle.dumps(rows))):  # a spawned worker gets the copy\n"
        "    for i in range(len(each)):\n"
        "        assert (each[i]['tokens'].numpy() == whole.tokens[i]).all()\n"
        "        assert (each[i]['logprobs'].numpy() == whole.targets.logprobs[i]).all()\n"
        "print(batch['mask'].dtype)\n"
    )
    shapes, dtype = run_without(BLOCKED, script, tmp_path).splitlines()
    assert f"'logprobs': [{ROWS}, {LENGTH}, 5]" in shapes and dtype == "torch.bool"
