"""Logprobs made elsewhere: each form gives the cache of the definition; what is none is refused."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_distill import audit, data, distil, hf
from jax_distill.base.errors import UserError
from jax_distill.batch import Batch
from jax_distill.cache import Cache
from jax_distill.config import (
    CacheConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    LossConfig,
    StudentConfig,
    TeacherConfig,
    TrainConfig,
)
from jax_distill.import_logprobs.reading import encode
from jax_distill.import_logprobs.writing import import_caches
from jax_distill.teacher_test import VOCAB, hf_folder, hidden_states, random_model, single_rows
from jax_distill.verify import check_cache

TOP_K, LENGTH = 8, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of a teacher, which is the student too."""
    folder = tmp_path_factory.mktemp("import")
    hf_folder(folder / "teacher")
    return folder


@pytest.fixture(scope="module")
def sequences(folder) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids [n], log-probabilities [n,V] in float64) of 30 sequences of 1 to LENGTH tokens."""
    model = random_model()
    rows = single_rows(30, LENGTH)
    head = np.asarray(model.lm_head_weight(), np.float64)[:VOCAB]
    logits = hidden_states(model, rows).astype(np.float64) @ head.T
    logprobs = logits - np.log(
        np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)
    )
    logprobs -= logits.max(-1, keepdims=True)
    lengths = rows["segment_ids"].sum(axis=1)
    return [(rows["tokens"][i, :n], logprobs[i, :n]) for i, n in enumerate(lengths)]


def own_form(tokens, logprobs) -> dict:
    """By falling id, which no writer has to keep from doing."""
    ids = np.sort(np.argsort(-logprobs, axis=-1, kind="stable")[:, :TOP_K])[:, ::-1]
    values = np.take_along_axis(logprobs, ids, -1)
    return {"tokens": tokens.tolist(), "top_ids": ids.tolist(), "top_logprobs": values.tolist()}


def vllm_form(tokens, logprobs) -> dict:
    """With the actual token as a K+1st where it is not among the K."""
    entries: list[dict | None] = [None]
    for following, row in zip(tokens[1:], logprobs, strict=False):
        ids = [*np.argsort(-row, kind="stable")[:TOP_K]]
        ids = [following, *(i for i in ids if i != following)]
        order = np.argsort(np.argsort(-row, kind="stable"))
        entries.append(
            {
                str(i): {"logprob": row[i], "rank": int(order[i]) + 1, "decoded_token": f"w{i}"}
                for i in ids
            }
        )
    return {"prompt_token_ids": tokens.tolist(), "prompt_logprobs": entries}


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(folder: Path, file: Path, name: str) -> Config:
    return Config(
        output_dir=str(folder / f"run_{name}"),
        seed=3,
        teacher=TeacherConfig(path="the served teacher", dtype="float32", batch_size=8),
        student=StudentConfig(path=str(folder / "teacher")),
        data=DataConfig(
            path=str(file), format="tokens", sequence_length=LENGTH, heldout_fraction=0.2
        ),
        cache=CacheConfig(path=str(folder / name), top_k=TOP_K, shard_rows=4),
        loss=LossConfig(chunk_size=16),
        train=TrainConfig(steps=2, compute_dtype="float32", remat="none", log_every=1),
        evaluate=EvaluateConfig(samples=0),
    )


@pytest.fixture(scope="module")
def vllm(folder, sequences) -> Config:
    """Imported once."""
    file = write_lines(folder / "vllm.jsonl", [vllm_form(*each) for each in sequences])
    config = make_config(folder, file, "vllm")
    import_caches(config)
    return config


def test_the_cache_holds_what_the_float64_definition_says(vllm, sequences):
    """Tokens in whole sequences, each with its own targets: the K largest and the rest."""
    known = {tuple(tokens): logprobs for tokens, logprobs in sequences}
    found = []
    for split in ("train", "heldout"):
        cache = Cache.open(f"{vllm.cache.path}/{split}")
        cache.require_complete()
        batch = cache.read(range(cache.rows))
        for row in range(cache.rows):
            for segment in range(1, batch.segment_ids[row].max() + 1):
                at = np.flatnonzero(batch.segment_ids[row] == segment)
                tokens = tuple(batch.tokens[row, at])
                found.append(tokens)
                assert batch.mask[row, at].tolist() == [True] * (len(at) - 1) + [False]
                for place, log_p in zip(at[:-1], known[tokens], strict=False):
                    check_position(batch, row, place, log_p)
                assert batch.targets.count[row, at[-1]] == 0  # nothing is known of what follows
    assert sorted(found) == sorted(tuple(tokens) for tokens, _ in sequences)


def check_position(batch: Batch, row: int, place: int, log_p: np.ndarray) -> None:
    """One position against log-probabilities [V]: float16 gaps move a log p by 2^-11 of its gap."""
    best = np.argsort(-log_p, kind="stable")[:TOP_K]
    targets = batch.targets
    assert targets.indices[row, place].tolist() == best.tolist()
    tail = np.log1p(-np.exp(log_p[best]).sum())
    assert targets.log_tail[row, place] == pytest.approx(tail, rel=2**-22)
    tolerance = 2.0**-11 * (log_p[best[0]] - log_p[best[-1]]) * 2 + 1e-6
    np.testing.assert_allclose(targets.logprobs[row, place], log_p[best], rtol=0, atol=tolerance)


@pytest.mark.parametrize("form", ["own", "own_parquet", "vllm_parquet"])
def test_every_form_gives_the_same_cache(form, folder, sequences, vllm):
    rows = [(vllm_form if "vllm" in form else own_form)(*each) for each in sequences]
    if form == "own":
        for row in rows:  # nothing is known of what follows the last token
            row["top_ids"].pop(), row["top_logprobs"].pop()
        file = write_lines(folder / "own.jsonl", rows)
    else:
        pa = pytest.importorskip("pyarrow")
        for row in rows if form == "vllm_parquet" else []:
            row["prompt_logprobs"] = [
                each and [(int(i), v["logprob"]) for i, v in each.items()]
                for each in row["prompt_logprobs"]
            ]
        kinds = {
            "prompt_token_ids": pa.list_(pa.int64()),
            "prompt_logprobs": pa.list_(pa.map_(pa.int64(), pa.float64())),
            "tokens": pa.list_(pa.int32()),
            "top_ids": pa.list_(pa.list_(pa.int32())),
            "top_logprobs": pa.list_(pa.list_(pa.float64())),
        }
        schema = pa.schema([(key, kinds[key]) for key in rows[0]])
        file = folder / f"{form}.parquet"
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows, schema), file)
    config = make_config(folder, file, form)
    import_caches(config)
    for split in ("train", "heldout"):
        ours, theirs = (Cache.open(f"{x.cache.path}/{split}") for x in (config, vllm))
        left, right = (x.read_arrays(np.arange(theirs.rows)) for x in (ours, theirs))
        for name, array in right.items():
            last = name.startswith("teacher") and form == "own_parquet"  # which has one entry more
            where = left["loss_mask"] > 0 if last else np.ones(len(array), bool)
            np.testing.assert_array_equal(left[name][where], array[where], err_msg=name)


def test_the_same_sequences_are_held_out_as_of_token_data(vllm, folder, sequences):
    file = write_lines(folder / "tokens.jsonl", [{"tokens": t.tolist()} for t, _ in sequences])
    corpus = data.Corpus(
        str(file),
        format="tokens",
        tokenizer=data.Tokenizer.load(folder / "teacher"),
        heldout_fraction=vllm.data.heldout_fraction,
    )
    for split in ("train", "heldout"):
        expected = sorted(tuple(document.tokens) for _, document in corpus.documents(split))
        cache = Cache.open(f"{vllm.cache.path}/{split}")
        rows = cache.read_arrays(np.arange(cache.rows))
        found = [
            tuple(tokens[segments == segment])
            for tokens, segments in zip(rows["tokens"], rows["segment_ids"], strict=True)
            for segment in range(1, segments.max() + 1)
        ]
        assert sorted(found) == expected


def test_training_from_an_import_and_its_audit(vllm, folder, capsys):
    """The teacher is not here, so what it would check is left out; the teacher itself agrees."""
    with jax.numpy_dtype_promotion("standard"):
        distil.main(vllm)
    said = capsys.readouterr().out
    assert "training from the cache alone" in said and "is there," in said
    summary = json.loads((folder / "run_vllm/summary.json").read_text())
    assert summary["steps"] == 2
    assert audit.main([vllm.cache.path, "--verify"]) == 0
    cache = Cache.open(f"{vllm.cache.path}/train")
    verdict = check_cache(hf.load_model(folder / "teacher"), cache, rows=8, temperature=1.0)
    assert verdict.matches and not verdict.warning, verdict.line


def test_ties_order_clamps_and_the_entries_beyond_k():
    """By hand. Position 0 sums to more than 1; 1 has nothing; 2 a tie at the border of the K."""
    position = np.array([0, 0, 2, 2, 2])
    ids, p = np.array([5, 3, 9, 4, 7], np.int32), np.array([0.4, 0.601, 0.25, 0.25, 0.5])
    found, clamped = encode(position, ids, np.log(p), length=3, top_k=2)
    assert clamped == 1 and found.count.tolist() == [2, 0, 2]
    assert found.indices[0].tolist() == [3, 5] and found.indices[2].tolist() == [7, 4]
    targets = found.decode(1.0)
    assert targets.log_tail.tolist() == [-np.inf, 0.0, np.float32(np.log(0.25))]
    np.testing.assert_allclose(np.exp(targets.logprobs[0]).sum(), 1.0, rtol=1e-6)
    np.testing.assert_allclose(np.exp(targets.logprobs[2]), [0.5, 0.25], rtol=1e-3)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a"}, "expected the key tokens, got text"),
        ({"tokens": [1, 2], "top_ids": [[3]]}, "expected the key top_logprobs"),
        ({"tokens": [1, 300], "top_ids": [[3]], "top_logprobs": [[-1.0]]}, "0 to 299, got 300"),
        ({"tokens": [1, 2], "top_ids": [[-3]], "top_logprobs": [[-1.0]]}, "0 to 299, got -3"),
        ({"tokens": [1, 2], "top_ids": [[3, 3]], "top_logprobs": [[-1.0, -2]]}, "3 twice at 0"),
        ({"tokens": [1, 2], "top_ids": [[3]], "top_logprobs": [[float("nan")]]}, "finite"),
        ({"tokens": [1, 2], "top_ids": [[3]], "top_logprobs": [[float("-inf")]]}, "got -inf for"),
        ({"tokens": [1, 2], "top_ids": [[3, 4]], "top_logprobs": [[0.0, -0.5]]}, "got 1.607 at"),
        ({"tokens": [1, 2], "top_ids": [[3]], "top_logprobs": [[0.5]]}, "sum to 1 at most"),
        ({"tokens": [1, 2], "top_ids": [[3]], "top_logprobs": [["x"]]}, "logprobs to be numbers"),
        ({"tokens": [1, 2, 3], "top_ids": [[3]], "top_logprobs": [[-1.0]]}, "of 3 positions"),
        ({"tokens": [1, 2], "top_ids": [[3.5]], "top_logprobs": [[-1.0]]}, "whole numbers"),
        ({"tokens": [1, 2], "top_ids": [[3]], "top_logprobs": [[[-1.0]]]}, "to be numbers"),
        ({"tokens": [1, 2], "top_ids": [[3]], "top_logprobs": [[10**400]]}, "to be numbers"),
        (
            {"tokens": [1, 2], "targets": [0, 2], "top_ids": [[3]], "top_logprobs": [[-1.0]]},
            "targets: expected 0 to 1, got 2; fix it",
        ),
        ({"prompt_token_ids": [1, 2], "prompt_logprobs": {"0": None}}, "null first, got"),
        ({"prompt_token_ids": [1, 2], "prompt_logprobs": 5}, "null first, got 5"),
        (
            {"prompt_token_ids": [1, 2], "prompt_logprobs": [None, [[float("inf"), -1]]]},
            "entry 1 of prompt",
        ),
        ({"prompt_token_ids": [1, 2], "prompt_logprobs": [None]}, "each of 2 prompt_token_ids"),
        (
            {"prompt_token_ids": [1, 2], "prompt_logprobs": [{"1": {"logprob": -1}}, None]},
            "null first",
        ),
        ({"prompt_token_ids": [1, 2], "prompt_logprobs": [None, {"a": -1}]}, "entry 1 of prompt"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(row, expected, folder):
    good = {"tokens": [1, 2], "top_ids": [[3]], "top_logprobs": [[-1.0]]}
    file = write_lines(folder / "wrong.jsonl", [good, row])
    with pytest.raises(UserError, match="wrong.jsonl:2: ") as refusal:
        import_caches(make_config(folder, file, "wrong"))
    assert expected in str(refusal.value)


def test_options_that_no_import_can_have_are_refused(folder):
    config = make_config(folder, folder / "vllm.jsonl", "refused")
    for changed, expected in (
        (replace(config, cache=replace(config.cache, temperatures=[1.0, 2.0])), "temperatures"),
        (replace(config, cache=replace(config.cache, top_p=0.9)), "cache.top_p null"),
        (replace(config, teacher=TeacherConfig()), "name who made the logprobs"),
        (replace(config, data=replace(config.data, path="builtin:english")), "files of logprobs"),
    ):
        with pytest.raises(UserError, match=expected):
            import_caches(changed)
