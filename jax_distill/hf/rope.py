"""The rope of a config.json, in either spelling → RopeConfig."""

from collections.abc import Mapping
from typing import Any

from jax_distill.base.errors import UserError
from jax_distill.base.json_object import shown
from jax_distill.model import RopeConfig
from jax_distill.model.rotary import yarn_attention_factor

ROPE_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset(
        """factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale
        mscale_all_dim truncate""".split()
    ),
    "llama3": frozenset(
        "factor original_max_position_embeddings low_freq_factor high_freq_factor".split()
    ),
}
# In a rope's dictionary but not of its type: transformers warns and computes without them.
IGNORED_ROPE_KEYS = frozenset({"finetuned"}).union(*ROPE_KEYS.values())
ROPE_SWITCHES = ("truncate", "finetuned")
REQUIRED_ROPE_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def read_rope_keys(kind: str) -> frozenset[str]:
    """Keys of the rope's dictionary that a type of rope looks at."""
    always = {"rope_type", "rope_theta", "partial_rotary_factor"}
    return ROPE_KEYS.get(kind, frozenset()) | always


def read_rope(raw: Mapping[str, Any], context: int, head_dim: int) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5), `rope_theta` + `rope_scaling` (before).
    A file may carry both if they agree."""
    rope = rope_dictionary(raw)
    kind = rope.pop("rope_type", "default")
    if kind not in ROPE_KEYS:
        raise UserError(
            f"expected rope_type {', '.join(ROPE_KEYS)}, got {kind!r}; use a model with one"
        )
    theta = rope.pop("rope_theta", 10000.0)
    partial = rope.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise UserError(
            f"expected partial_rotary_factor 1, got {shown(partial)}; use another model"
        )
    if kind in ("yarn", "llama3"):
        # A value at the top level wins over the one inside, as in transformers.
        original = raw.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = (
            original or rope.get("original_max_position_embeddings") or context
        )
    unknown = sorted(set(rope) - ROPE_KEYS[kind])
    for key in unknown:
        if key not in IGNORED_ROPE_KEYS:
            raise UserError(
                f"expected no {shown(key)} for rope_type {kind}, got {shown(rope[key])}; use "
                "another model, or take the key out if it does not change the numbers"
            )
        del rope[key]
    for key in REQUIRED_ROPE_KEYS.get(kind, ()):
        if key not in rope:
            raise UserError(f"expected {key!r} for rope_type {kind}, got none; add it")
    _check_rope(kind, {"rope_theta": theta, **rope}, head_dim)
    if kind == "yarn":
        rope.setdefault("factor", context / rope["original_max_position_embeddings"])
        scale = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
        rope.setdefault("attention_factor", yarn_attention_factor(rope["factor"], *scale))
    return RopeConfig(rope_type=kind, rope_theta=float(theta), **rope)


def _check_rope(kind: str, rope: Mapping[str, Any], head_dim: int) -> None:
    """Refuse numbers that the formulas divide by, or take the logarithm of, where they must not."""
    for key, value in rope.items():
        if key == "truncate" or (key.startswith("mscale") and value == 0):  # 0: no mscale
            continue
        least = 1 if key == "rope_theta" else 0  # pairs turn more slowly, the further back
        # Between them fp32 holds quotients and powers, too.
        if not is_number(value) or not max(least, 1e-30) < value < 1e30:
            raise UserError(
                f"expected the rope's {key!r} above {least}, got {shown(value)}; "
                "correct config.json"
            )
    low, high = rope.get("low_freq_factor", 0), rope.get("high_freq_factor", 1)
    if kind == "llama3" and not low < high:
        raise UserError(
            f"expected low_freq_factor below high_freq_factor, got {low} and {high}; "
            "correct config.json"
        )
    if kind == "dynamic" and head_dim == 2:
        raise UserError("expected a head_dim above 2 for rope_type dynamic, got 2; use another")


def rope_dictionary(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Of both spellings and the top level; keys that are null are left out. Raises UserError where
    two disagree, or a value is of another kind."""
    merged: dict[str, Any] = {}
    top = {key: raw.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for source in (raw.get("rope_scaling"), raw.get("rope_parameters"), top):
        if source and not isinstance(source, dict):
            raise UserError(
                f"expected the rope as an object, got {shown(source)}; correct config.json"
            )
        for key, value in (source or {}).items():
            key = "rope_type" if key == "type" else key
            if isinstance(value, dict):
                raise UserError(f"expected one rope for all layers, got one for {shown(key)}")
            if value is None:
                continue
            fits = isinstance(value, str if key == "rope_type" else int | float)
            if not fits or (isinstance(value, bool) and key not in ROPE_SWITCHES):
                raise UserError(
                    f"expected {'text' if key == 'rope_type' else 'a number'} for the rope's "
                    f"{shown(key)}, got {shown(value)}; correct config.json"
                )
            if merged.setdefault(key, value) != value:
                raise UserError(
                    f"expected one value of {shown(key)}, got {shown(merged[key])} and "
                    f"{shown(value)} in rope_scaling, rope_parameters or beside them; keep one"
                )
    return merged


def is_number(value: Any) -> bool:
    """An int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
