"""Which layers of student and teacher a hidden-state loss compares, and what its projections start
as: decided alike by both backends. No jax, no torch.

Letters: P pairs, D the student's width, D' the teacher's, T positions.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jax_distill.base.errors import UserError
from jax_distill.cache import Manifest
from jax_distill.cache.manifest import HIDDEN_PREFIX
from jax_distill.config import Config
from jax_distill.objective import Pair

MOST_BY_DEFAULT = 4
PROJECTION = "hidden_projection"
"""The parameter's name in checkpoints."""


def spread_layers(count: int, depth: int) -> list[int]:
    """`count` of `depth` layers at equal distances, the last of them too:
    ⌊(i+1)·depth/count⌋ − 1."""
    return [(i + 1) * depth // count - 1 for i in range(count)]


def layer_pairs(
    wanted: int | Sequence[Sequence[int]] | None, *, student: int, teacher: int
) -> tuple[Pair, ...]:
    """(student's layer, teacher's layer) of each pair, for models of so many layers.

    wanted: the pairs themselves, how many to spread evenly over both models, or None for four, or
    as many as the shallower model has.

    Raises:
        UserError: layers that a model lacks, or that occur twice.
    """
    most = min(student, teacher)
    if wanted is None:
        wanted = min(MOST_BY_DEFAULT, most)
    if isinstance(wanted, int):
        if not 1 <= wanted <= most:
            raise UserError(
                f"expected loss.hidden_layers from 1 to {most}, the layers of the shallower model, "
                f"got {wanted}; choose one of these, or name pairs"
            )
        spread = (spread_layers(wanted, depth) for depth in (student, teacher))
        return tuple(zip(*spread, strict=True))
    if not wanted or any(len(pair) != 2 for pair in wanted):
        raise UserError(
            "expected loss.hidden_layers as pairs [student's layer, teacher's layer], got "
            f"{list(wanted)}; write them like [[0, 2], [1, 5]]"
        )
    for name, depth, chosen in zip(
        ("student", "teacher"), (student, teacher), zip(*wanted, strict=True), strict=True
    ):
        if len(set(chosen)) != len(chosen) or not all(0 <= layer < depth for layer in chosen):
            raise UserError(
                f"expected loss.hidden_layers of different layers from 0 to {depth - 1} of the "
                f"{name}, got {list(chosen)}; correct them"
            )
    return tuple((ours, theirs) for ours, theirs in wanted)


def cached_layers(wanted: int | Sequence[int], depth: int) -> list[int]:
    """The teacher's layers whose outputs a cache keeps (`cache.hidden_layers`), ascending: those
    named, or so many spread evenly over its `depth`.

    Raises:
        UserError: layers that it lacks, or that occur twice.
    """
    if isinstance(wanted, int):
        if wanted > depth:
            raise UserError(
                f"expected cache.hidden_layers up to the teacher's {depth} layers, got {wanted}; "
                "lower it"
            )
        return spread_layers(wanted, depth)
    if len(set(wanted)) != len(wanted) or not all(0 <= layer < depth for layer in wanted):
        raise UserError(
            f"expected cache.hidden_layers of different layers from 0 to {depth - 1} of the "
            f"teacher, got {list(wanted)}; correct them"
        )
    return sorted(wanted)


def hidden_arrays(layers: Sequence[int], length: int, width: int) -> dict[str, list[int]]:
    """`Manifest.optional` of a cache that keeps these layers' outputs, [T,D'] a row."""
    return {f"{HIDDEN_PREFIX}{layer}": [length, width] for layer in layers}


def with_pairs(config: Config, *, student: int, teacher: int | None) -> Config:
    """The configuration with `loss.hidden_layers` as pairs, for models of so many layers; unchanged
    without `loss.hidden_weight`. teacher: None where its config.json is not here.

    Raises:
        UserError: see `layer_pairs`; nothing to spread the layers over.
    """
    loss = config.loss
    if not loss.hidden_weight:
        return config
    if teacher is None:
        if not isinstance(loss.hidden_layers, list):
            raise UserError(
                "expected loss.hidden_layers as pairs of layers where the teacher's config.json is "
                f"not here, got {loss.hidden_layers}; name them like [[0, 2], [1, 5]]"
            )
        teacher = 1 + max((max(pair, default=0) for pair in loss.hidden_layers), default=0)
    pairs = layer_pairs(loss.hidden_layers, student=student, teacher=teacher)
    return replace(config, loss=replace(loss, hidden_layers=[list(pair) for pair in pairs]))


def teacher_width(config: Config, manifest: Manifest, live_width: int | None) -> int:
    """D', of a live teacher or of a cache's hidden states.

    Raises:
        UserError: the cache lacks some of those that the loss compares.
    """
    if live_width is not None:
        return live_width
    objective, stored = config.loss.hidden_objective(), manifest.hidden_shapes()
    assert objective is not None
    wanted = sorted(objective.teacher_layers)
    if not set(wanted) <= stored.keys():
        raise UserError(
            f"expected a cache with the teacher's hidden states of layers {wanted}, got "
            f"{sorted(stored) or 'none'}; set cache.hidden_layers {wanted} and another cache.path, "
            "or teacher.mode online"
        )
    return stored[wanted[0]][1]


def start_projection(pairs: int, *, width: int, teacher: int, seed: int) -> np.ndarray:
    """float32 [P,D',D], normal of variance 1/D, which keeps the length of a state of width D."""
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal((pairs, teacher, width), dtype=np.float32)
    return drawn * np.float32(width**-0.5)
