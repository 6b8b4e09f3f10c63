"""Text that needs no download: prose of installed packages, the same at every reading."""

import numpy as np

from jax_distill.data import read_texts
from jax_distill.data.builtin import _triple_quoted, gather, read_builtin
from jax_distill.data_test import read, tokenizer

__all__ = ["tokenizer"]


def test_builtin_english_is_prose_and_the_same_every_time():
    first = list(read_texts("builtin:english", heldout_fraction=0.02))
    characters = sum(map(len, first))
    assert 7e6 < characters < 20e6 and len(first) > 1500
    paragraphs = ["".join(p.split()) for text in first[:300] for p in text.split("\n\n")]
    long = [paragraph for paragraph in paragraphs if len(paragraph) >= 80]
    assert len(long) == len(set(long))
    letters = sum(character.isalpha() or character.isspace() for character in "".join(first[:300]))
    assert letters > 0.8 * sum(map(len, first[:300]))


def test_builtin_topics_are_read_the_same_twice(tokenizer):
    one = read("builtin:pydoc_topics", tokenizer, heldout_fraction=0.05)
    read_builtin.cache_clear()
    two = read("builtin:pydoc_topics", tokenizer, heldout_fraction=0.05)
    assert 50 < len(one.train) and 1 <= len(one.heldout) < 30
    assert all(
        np.array_equal(a.tokens, b.tokens) for a, b in zip(one.train, two.train, strict=True)
    )


def test_docstrings_are_told_from_quotes_in_comments_and_strings():
    source = '''
def f():
    """First \\u00e9
    second."""
    x = \'"""\'  # a """ in a comment
    y = f"""{x} not text"""
    z = "a \\\\""
    r"""raw \\d"""
'''
    assert _triple_quoted(source) == ["First é\nsecond.", "raw \\d"]


def test_gather_keeps_every_piece_in_order():
    pieces = [str(i) * (i % 7) for i in range(50)]
    assert "\n\n".join(gather(pieces, 20)).split("\n\n") == pieces
    assert list(gather([], 20)) == []
