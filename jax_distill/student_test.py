"""A student cut from its teacher, and the vocabulary that a student shares with a store."""

import dataclasses

import numpy as np
import pytest

from jax_distill import hf, student
from jax_distill.cache_test import small
from jax_distill.config import Refusal
from jax_distill.teacher_test import hf_folder, model_config


def test_student_by_size_keeps_first_and_last_layers():
    config = dataclasses.replace(model_config(), num_hidden_layers=10)
    full = student.count_parameters(config)
    assert student.layers_for(config, full) == list(range(10))
    layer = (full - student.count_parameters(model_config())) // 8
    assert student.layers_for(config, full - 7 * layer) == [0, 1, 9]
    with pytest.raises(Refusal, match="at least"):
        student.layers_for(config, 100)


def test_student_keeps_the_chosen_layers_bit_for_bit(tmp_path):
    folder = hf_folder(tmp_path / "teacher")
    out = student.make_student(folder, tmp_path / "s", layers=[1], parameters=None)
    teacher, got = hf.load_model(folder), hf.load_model(out)
    np.testing.assert_array_equal(
        got.layers.mlp.up_proj.weight[...][0], teacher.layers.mlp.up_proj.weight[...][1]
    )
    with pytest.raises(Refusal, match="rising"):
        student.make_student(folder, tmp_path / "t", layers=[1, 0], parameters=None)


@pytest.mark.parametrize(
    ("own", "real", "said"),
    [
        (50, 50, ""),
        (60, 60, "the teacher lacks ids 50…59: they join the tail\n"),
        (45, 45, "the student lacks ids 45…49: they join the tail\n"),
    ],
)
def test_ids_that_one_side_lacks_are_reported_once(tmp_path, capsys, own, real, said):
    """Case 2: real columns are those of the student's own tokenizer."""
    words = [f"w{i}" for i in range(60)]
    store, *_ = small(tmp_path / "store", vocabulary={w: i for i, w in enumerate(words[:50])})
    folder = hf_folder(tmp_path / "student", words=words[:own])
    assert student.vocabulary_size(folder, store) == real
    assert capsys.readouterr().out == said


def test_an_embedding_that_lacks_ids_of_the_store_is_refused(tmp_path):
    store, *_ = small(tmp_path / "store", vocab_size=400)
    folder = hf_folder(tmp_path / "student")
    with pytest.raises(Refusal, match=f"largest id {store.largest_token}, got 320 in .*student"):
        student.vocabulary_size(folder, store)
