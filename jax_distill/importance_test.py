"""The importance of layers against its definition in float64, and the student that keeps them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_distill import hf, student
from jax_distill.base.errors import UserError
from jax_distill.importance import layer_importance, most_important
from jax_distill.model import count_parameters
from jax_distill.teacher_test import hf_folder, manifest, model_config, random_model, single_rows
from jax_distill.teacher_test import write as write_cache

LENGTH, DEPTH = 12, 4


@pytest.fixture
def model():
    """Layer 2 changes nothing."""
    model = random_model(num_hidden_layers=DEPTH)
    for linear in (model.layers.self_attn.o_proj, model.layers.mlp.down_proj):
        linear.weight[...] = linear.weight[...].at[2].set(0.0)
    return model


def test_importance_is_its_definition_and_the_student_keeps_the_most_important(
    model, tmp_path, capsys
):
    rows = single_rows(3, LENGTH)
    cache = write_cache(tmp_path / "c", rows, random_model(), manifest(LENGTH))
    found = layer_importance(model, cache, np.arange(3))

    inputs = (jnp.asarray(rows[name]) for name in ("tokens", "segment_ids", "positions"))
    outputs = np.float64(model.apply(*inputs, hidden_layers=range(DEPTH)).layers)
    before = np.float64(model.embed_tokens.weight[...])[rows["tokens"]]
    real, expected = rows["segment_ids"] > 0, []
    for after in outputs:
        norms = np.linalg.norm(before, axis=-1) * np.linalg.norm(after, axis=-1)
        expected.append((1 - (before * after).sum(axis=-1) / norms)[real].mean())
        before = after
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert abs(found[2]) < 1e-5 and most_important(found, 3) == [0, 1, 3]

    folder = hf_folder(tmp_path / "teacher", num_hidden_layers=DEPTH)
    hf.save_weights(folder, model, model.config)
    size = count_parameters(model_config(num_hidden_layers=3))
    words = ["--teacher", str(folder), "--out", str(tmp_path / "s"), "--importance", cache.path]
    student.main([*words, "--parameters", str(size)])
    assert "student.from_teacher.layers '[0, 1, 3]'" in capsys.readouterr().out
    got = hf.load_model(tmp_path / "s").layers.mlp.up_proj.weight[...]
    np.testing.assert_array_equal(got, model.layers.mlp.up_proj.weight[...][np.array([0, 1, 3])])
    with pytest.raises(UserError, match="expected --parameters or a width with --importance"):
        student.main([*words, "--layers", "0"])
