"""Each source's held-out documents are the mixture's."""

import dataclasses

from jax_distill import teacher
from jax_distill.batch import Batch
from jax_distill.by_source import source_caches
from jax_distill.config import Source
from jax_distill.teacher_test import config, text_file

__all__ = ["config"]


def documents(cache) -> set[tuple[int, ...]]:
    found = set()
    for row in range(cache.rows):
        batch: Batch = cache.read([row], targets=False)
        for segment in range(1, int(batch.segment_ids.max()) + 1):
            found.add(tuple(batch.tokens[batch.segment_ids == segment].tolist()))
    return found


def test_held_out_documents_of_the_sources_are_those_of_the_mixture(config, tmp_path, capsys):
    """And a source that holds nothing out is said, the others stay."""
    files = [text_file(tmp_path / f"{seed}.jsonl", seed=seed) for seed in (1, 2)]
    (tmp_path / "short.jsonl").write_text('{"text": "w1 w2"}')
    paths = [*map(str, files), str(tmp_path / "short.jsonl")]
    # Rows as long as every document: none is split.
    data = dataclasses.replace(config.data, path=[Source(p) for p in paths], sequence_length=64)
    config = dataclasses.replace(
        config, data=data, teacher=dataclasses.replace(config.teacher, mode="online")
    )
    folder = tmp_path / "teacher"
    found = source_caches(config, folder)
    assert list(found) == paths[:2] and "no test table of" in capsys.readouterr().out
    _, mixture = teacher.write_caches(config)
    first, second = map(documents, found.values())
    assert first and second and first | second == documents(mixture)
    one = dataclasses.replace(config, data=dataclasses.replace(data, path=paths[0]))
    assert source_caches(one, folder) == {}
