"""config.json → ModelConfig. What the decoder cannot do is refused by name, never dropped."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax_distill.config import Refusal
from jax_distill.model import ModelConfig, RopeConfig
from jax_distill.model.rotary import yarn_attention_factor

# Keys that say nothing about the forward pass: bookkeeping, generation, training, old dumps.
NEUTRAL_KEYS = frozenset(
    """architectures model_type transformers_version dtype torch_dtype use_cache is_llama_config
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id pretraining_tp
    id2label label2id problem_type task_specific_params transformers.js_config auto_map
    output_attentions output_hidden_states return_dict use_return_dict chunk_size_feed_forward
    max_length min_length do_sample early_stopping num_beams num_beam_groups temperature top_k
    top_p typical_p repetition_penalty length_penalty diversity_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences tokenizer_class prefix name_or_path
    tf_legacy_loss use_bfloat16 torchscript unsloth_version unsloth_fixed""".split()
)
LLAMA_KEYS = frozenset(
    """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act max_position_embeddings initializer_range rms_norm_eps
    tie_word_embeddings attention_bias attention_dropout mlp_bias rope_theta rope_scaling
    rope_parameters original_max_position_embeddings partial_rotary_factor""".split()
)
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
REQUIRED_ROPE_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def read_config(folder: str | Path) -> dict[str, Any]:
    """The folder's config.json as it stands. Refuses a folder without a readable one."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise Refusal(f"expected a model folder with config.json, got {folder}; do check the path")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Refusal(f"expected JSON in {path}, got {error}; do restore the file") from error
    if not isinstance(raw, dict):
        raise Refusal(f"expected a JSON object in {path}, got {type(raw).__name__}; do restore it")
    return raw


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """A config.json's content → ModelConfig. Raises Refusal for an architecture or a feature that
    the decoder does not have, naming it; a key that is null, false or empty is off."""
    names = raw.get("architectures") or []
    for name in names:
        if name not in ARCHITECTURES:
            raise Refusal(_unknown_architecture(name))
    for name, (family, read) in ARCHITECTURES.items():
        if raw.get("model_type") == family and names in ([], [name]):
            return read(raw)
    raise Refusal(_unknown_architecture(f"model_type {raw.get('model_type')!r} of {names}"))


def _unknown_architecture(name: str) -> str:
    return f"expected an architecture of {', '.join(ARCHITECTURES)}, got {name}; do use one of them"


def _llama(raw: Mapping[str, Any]) -> ModelConfig:
    _refuse_unknown_keys(raw, LLAMA_KEYS)
    _expect(raw, "hidden_act", "silu", ("silu", "swish"))
    _expect(raw, "attention_dropout", 0.0, (0.0,))
    heads = _whole(raw, "num_attention_heads")
    hidden_size = _whole(raw, "hidden_size")
    kv_heads = _whole(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise Refusal(
            f"expected num_attention_heads to be a multiple of num_key_value_heads, got {heads} "
            f"and {kv_heads}; do correct config.json"
        )
    if raw.get("head_dim") is None and hidden_size % heads:
        raise Refusal(
            f"expected hidden_size to be a multiple of num_attention_heads, got {hidden_size} and "
            f"{heads}; do state head_dim in config.json"
        )
    head_dim = _whole(raw, "head_dim", hidden_size // heads)
    if head_dim % 2:
        raise Refusal(f"expected an even head_dim, got {head_dim}; do correct config.json")
    context = _whole(raw, "max_position_embeddings", 2048)
    return ModelConfig(
        vocab_size=_whole(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_whole(raw, "intermediate_size"),
        num_hidden_layers=_whole(raw, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        max_position_embeddings=context,
        tie_word_embeddings=_switch(raw, "tie_word_embeddings"),
        attention_bias=_switch(raw, "attention_bias"),
        mlp_bias=_switch(raw, "mlp_bias"),
        initializer_range=_number(raw, "initializer_range", 0.02),
        rope=_rope(raw, context, head_dim),
    )


# HF class name → (model_type, reader). A new family is a line here and a function above.
ARCHITECTURES: dict[str, tuple[str, Callable[[Mapping[str, Any]], ModelConfig]]] = {
    "LlamaForCausalLM": ("llama", _llama),
}


def _rope(raw: Mapping[str, Any], context: int, head_dim: int) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5), `rope_theta` + `rope_scaling` (before).
    A file may carry both if they agree."""
    rope = _rope_dictionary(raw)
    kind = rope.pop("rope_type", "default")
    if kind not in ROPE_KEYS:
        raise Refusal(
            f"expected rope_type {', '.join(ROPE_KEYS)}, got {kind!r}; do use a model with one"
        )
    theta = float(rope.pop("rope_theta", 10000.0))
    partial = rope.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise Refusal(f"expected partial_rotary_factor 1, got {partial}; Llama turns whole heads")
    if kind in ("yarn", "llama3"):
        # A value at the top level wins over the one inside, as in transformers.
        original = raw.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = (
            original or rope.get("original_max_position_embeddings") or context
        )
    unknown = sorted(set(rope) - ROPE_KEYS[kind])
    if unknown:
        raise Refusal(f"expected no {unknown[0]!r} for rope_type {kind}, got {rope[unknown[0]]!r}")
    for key in REQUIRED_ROPE_KEYS.get(kind, ()):
        if key not in rope:
            raise Refusal(f"expected {key!r} for rope_type {kind}, got none; do add it")
    _check_rope(kind, {"rope_theta": theta, **rope}, head_dim)
    if kind == "yarn":
        rope.setdefault("factor", context / rope["original_max_position_embeddings"])
        scale = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
        rope.setdefault("attention_factor", yarn_attention_factor(rope["factor"], *scale))
    return RopeConfig(rope_type=kind, rope_theta=theta, **rope)


def _check_rope(kind: str, rope: Mapping[str, Any], head_dim: int) -> None:
    """Refuse numbers that the formulas divide by, or take the logarithm of, where they must not."""
    for key, value in rope.items():
        if key == "truncate" or (key.startswith("mscale") and value == 0):  # 0: no mscale
            continue
        least = 1 if key == "rope_theta" else 0  # pairs turn more slowly, the further back
        if not isinstance(value, int | float) or not least < value < math.inf:
            raise Refusal(
                f"expected the rope's {key!r} above {least}, got {value!r}; do correct config.json"
            )
    low, high = rope.get("low_freq_factor", 0), rope.get("high_freq_factor", 1)
    if kind == "llama3" and not low < high:
        raise Refusal(
            f"expected low_freq_factor below high_freq_factor, got {low} and {high}; "
            "do correct config.json"
        )
    if kind == "dynamic" and head_dim == 2:
        raise Refusal("expected a head_dim above 2 for rope_type dynamic, got 2; do use another")


def _rope_dictionary(raw: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    top = {key: raw.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for source in (raw.get("rope_scaling"), raw.get("rope_parameters"), top):
        if source and not isinstance(source, dict):
            raise Refusal(f"expected the rope as an object, got {source!r}; do correct config.json")
        for key, value in (source or {}).items():
            key = "rope_type" if key == "type" else key
            if isinstance(value, dict):
                raise Refusal(f"expected one rope for all layers, got one for {key!r}")
            if value is None:
                continue
            fits = isinstance(value, str if key == "rope_type" else int | float)
            if not fits or (isinstance(value, bool) and key != "truncate"):
                raise Refusal(
                    f"expected {'text' if key == 'rope_type' else 'a number'} for the rope's "
                    f"{key!r}, got {value!r}; do correct config.json"
                )
            if merged.setdefault(key, value) != value:
                raise Refusal(
                    f"expected one value of {key!r}, got {merged[key]!r} and {value!r} in "
                    "rope_scaling, rope_parameters or beside them; do keep one"
                )
    return merged


def _refuse_unknown_keys(raw: Mapping[str, Any], known: frozenset[str]) -> None:
    for key, value in raw.items():
        off = value is None or value is False or value == {} or value == []
        if not (off or key in known or key in NEUTRAL_KEYS or key.startswith("_")):
            raise Refusal(
                f"expected a config.json that the decoder knows, got {key!r}: {value!r}; do use "
                "another model, or take the key out if it does not change the numbers"
            )


def _expect(raw: Mapping[str, Any], key: str, default: Any, allowed: tuple) -> None:
    value = _value(raw, key, default)
    if value not in allowed:
        raise Refusal(f"expected {key} {allowed[0]!r}, got {value!r}; do use a model with that")


def _value(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    value = raw.get(key)
    return default if value is None else value


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = _value(raw, key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise Refusal(
            f"expected a number above 0 for {key!r}, got {value!r}; do correct config.json"
        )
    return float(value)


def _switch(raw: Mapping[str, Any], key: str) -> bool:
    value = _value(raw, key, False)
    if not isinstance(value, bool):
        raise Refusal(f"expected true or false for {key!r}, got {value!r}; do correct config.json")
    return value


def _whole(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _value(raw, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Refusal(
            f"expected a positive whole number for {key!r}, got {value!r}; do correct config.json"
        )
    return value
