"""lm-evaluation-harness gives a folder the same numbers through our Decoder and through
transformers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import yaml

from jax_distill import tasks
from jax_distill.base.errors import UserError

lm_eval = pytest.importorskip("lm_eval")
huggingface = pytest.importorskip("lm_eval.models.huggingface")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("default::UserWarning"),
]
ITEMS = 12
CHOICES = {
    "task": "choices",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{label}}",
    "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
WORDS = {
    "task": "words",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[label]}}",
    "generation_kwargs": {"until": ["w7"], "max_gen_toks": 6, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}
TEXTS = {
    "task": "texts",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "word_perplexity"}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and tasks whose texts are its words."""
    path = tmp_path_factory.mktemp("tasks")
    tiny.llama_folder(path / "model", max_position_embeddings=64)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = (
            path / "model" / name
        )  # its special tokens w1 and w2 are found inside of w10 and w200
        file.write_text(file.read_text().replace('"w1"', '"<s>"').replace('"w2"', '"</s>"'))
    rng = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(3, tiny.VOCAB_SIZE, count))

    rows = [
        {
            "question": words(int(rng.integers(3, 90))),  # some are longer than the model
            "choices": [" " + words(int(rng.integers(1, 5))) for _ in range(3)],
            "label": int(rng.integers(0, 3)),
        }
        for _ in range(ITEMS)
    ]
    data = path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task in (CHOICES, WORDS, TEXTS):
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        text = yaml.safe_dump(task | source | {"test_split": "test"})
        (path / f"{task['task']}.yaml").write_text(text)
    return path


@pytest.fixture(scope="module")
def ours(folder):
    model = tasks.hf.load_model(
        folder / "model", param_dtype=np.float32, compute_dtype=np.float32, remat="none"
    )
    return tasks.TaskModel(model, tasks.Tokenizer.load(folder / "model"), batch_size=4)


@pytest.fixture(scope="module")
def samples(folder, ours):
    """What each backend answered, request by request: {backend: {task: [responses]}}."""
    theirs = huggingface.HFLM(
        pretrained=str(folder / "model"), dtype="float32", device="cpu", batch_size=4
    )
    manager = tasks.TaskManager(include_path=str(folder), include_defaults=False)
    found = {}
    for name, each in (("ours", ours), ("theirs", theirs)):
        result = lm_eval.simple_evaluate(
            model=each,
            tasks=["choices", "words", "texts"],
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=True,
        )
        found[name] = {
            task: [row["resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
            for task, rows in result["samples"].items()
        }
    return found


def test_log_probabilities_of_choices_and_texts_are_those_of_transformers(samples):
    ours, theirs = samples["ours"], samples["theirs"]
    assert len(ours["choices"]) == ITEMS
    for got, expected in zip(ours["choices"], theirs["choices"], strict=True):
        for (one,), (other,) in zip(got, expected, strict=True):
            assert float(one[0]) == pytest.approx(float(other[0]), abs=2e-4)
            assert one[1] == other[1]
    for ((one,),), ((other,),) in zip(ours["texts"], theirs["texts"], strict=True):
        assert float(one) == pytest.approx(float(other), rel=1e-5, abs=2e-4)


def test_greedy_continuations_are_those_of_transformers(samples):
    assert samples["ours"]["words"] == samples["theirs"]["words"]
    assert any(text for ((text,),) in samples["ours"]["words"])


def test_the_command_shows_models_beside_each_other(folder, tmp_path, capsys):
    model, out = str(folder / "model"), tmp_path / "found.json"
    options = ["--tasks", "choices", "--include", str(folder), "--limit", "5", "--batch_size", "4"]
    tasks.main([model, *options, "--json", str(out)])
    found = json.loads(out.read_text())[model]["choices"]
    assert 0 <= found["acc"] <= 1 and found["acc_stderr"] > 0
    assert "acc_norm" in capsys.readouterr().out
    with pytest.raises(UserError, match="expected tasks that .* knows, got nonsense"):
        tasks.main([model, *options[2:], "--tasks", "choices,nonsense"])


def test_an_empty_context_is_the_beginning_of_a_text(ours):
    options = {"until": [], "max_gen_toks": 6}
    empty, begun = (SimpleNamespace(args=(text, options)) for text in ("", "<s>"))
    found = ours.generate_until([empty, begun])
    assert found[0] == found[1] != ""
