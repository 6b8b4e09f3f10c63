"""Which beginnings of held-out documents are continued, and what is shown of them."""

import json

import numpy as np
import pytest

from jax_distill import samples
from jax_distill.cache import Cache, create
from jax_distill.data import vocabulary_of
from jax_distill.samples import PROMPT_TOKENS, Words, choose_prompts, continuations
from jax_distill.teacher_test import VOCAB, hf_folder, manifest, random_model

LENGTH = 100


@pytest.fixture
def cache(tmp_path) -> Cache:
    """Rows: documents of 10, 80 and 10 tokens; one of 20 and padding; padding alone; one of 100."""
    lengths = [(10, 80, 10), (20,), (), (100,)]
    rows = {
        name: np.zeros((len(lengths), LENGTH), np.int32)
        for name in ("tokens", "segment_ids", "positions")
    }
    for row, sizes in enumerate(lengths):
        start = 0
        for segment, size in enumerate(sizes, 1):
            where = slice(start, start + size)
            rows["tokens"][row, where] = 3 + np.arange(start, start + size)
            rows["segment_ids"][row, where], rows["positions"][row, where] = segment, range(size)
            start += size
    mask = (rows["segment_ids"] > 0).astype(np.uint8)
    made = manifest(LENGTH, top_k=0, temperatures=())
    with create(str(tmp_path / "cache"), made, len(lengths)) as writer:
        for shard, first, last in writer.missing_shards():
            part = {name: x[first : last + 1] for name, x in (rows | {"loss_mask": mask}).items()}
            writer.write(shard, part)
    return Cache.open(str(tmp_path / "cache"))


def test_prompts_begin_the_longest_document_of_rows_that_have_one(cache):
    found = choose_prompts(cache, np.arange(4), count=9, new_tokens=5)
    assert found.tokens.shape == (3, PROMPT_TOKENS)
    for row, start, size in ((0, 10, PROMPT_TOKENS), (1, 0, 10), (2, 0, PROMPT_TOKENS)):
        padding = [0] * (PROMPT_TOKENS - size)
        end = 3 + start + size
        assert found.tokens[row].tolist() == [*padding, *range(3 + start, end)]
        assert found.segment_ids[row].tolist() == [*padding, *[1] * size]
        assert found.positions[row].tolist() == [*padding, *range(size)]
        assert found.following[row].tolist() == list(range(end, end + 5))
    assert len(choose_prompts(cache, np.arange(4), count=2, new_tokens=5).following) == 2


def test_what_is_continued_is_the_prompt_and_ends_at_an_end_of_text(cache, tmp_path, capsys):
    folder = hf_folder(tmp_path / "teacher")
    end = VOCAB - 1
    eos = next(word for word, number in vocabulary_of(folder).items() if number == end)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    words = Words(folder)
    model = random_model()
    found = continuations(
        {"student_before": model}, cache, np.arange(4), words, count=4, new_tokens=5
    )
    assert len(found) == 3
    assert found[1]["prompt"] == words.text(np.arange(3, 13))
    assert found[1]["continuations"]["the text itself"] == words.text(np.arange(13, 18))
    samples.print_samples(found)
    said = capsys.readouterr().out
    assert "sample 3" in said and "student before" in said
    kept = words.up_to_end(np.array([5, end, 6, end]))
    assert kept.tolist() == [5, end] and words.up_to_end(kept[:1]).tolist() == [5]
    assert continuations({"m": model}, cache, np.arange(2, 3), words, count=4, new_tokens=5) == []
    assert Words(tmp_path / "none").text(np.array([VOCAB - 1, 4])) == f"{VOCAB - 1} 4"
