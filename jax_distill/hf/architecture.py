"""config.json → ModelConfig. What the decoder cannot do is refused by name, never dropped."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_distill.base.errors import UserError
from jax_distill.base.json_object import read_json_object, shown
from jax_distill.hf.rope import is_number, read_rope, read_rope_keys, rope_dictionary
from jax_distill.model import ModelConfig

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
# Keys of other programs and of training that transformers' Llama does not look at: named once.
IGNORED_KEYS = frozenset(
    """max_sequence_length max_seq_length max_seq_len seq_length sequence_length model_max_length
    tokenizer_model_max_length n_ctx attn_implementation use_flash_attention use_flash_attn
    flash_attn use_flash_attention_2 gradient_checkpointing use_gradient_checkpointing
    attention_probs_dropout_prob hidden_dropout hidden_dropout_prob resid_pdrop embd_pdrop
    attn_pdrop dropout residual_dropout embedding_dropout keys_to_ignore_at_inference loss_type
    model_name base_model finetuned_from license language initial_context_length
    experts_per_token""".split()
)
# What every family's reader reads; below, what each reads besides.
COMMON_KEYS = frozenset(
    """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act max_position_embeddings initializer_range rms_norm_eps
    tie_word_embeddings attention_dropout rope_theta rope_scaling rope_parameters
    original_max_position_embeddings partial_rotary_factor layer_types""".split()
)
LLAMA_KEYS = frozenset({"attention_bias", "mlp_bias"})
MISTRAL_KEYS = frozenset({"sliding_window"})
QWEN2_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers"})
QWEN3_KEYS = QWEN2_KEYS | {"attention_bias"}
# The last two are of transformers' own training loss.
GPT_OSS_KEYS = frozenset(
    """attention_bias sliding_window num_local_experts num_experts_per_tok swiglu_alpha swiglu_limit
    quantization_config router_aux_loss_coef output_router_logits""".split()
)
SEED_OSS_KEYS = frozenset({"attention_bias", "attention_out_bias", "mlp_bias"})
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Sizes above any model's, so that a damaged number is refused before anything is allocated: the
# largest models have 126 layers, 53,248 wide MLPs, 256,000 tokens.
LARGEST = {
    "num_hidden_layers": 2**12,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**31 - 1,  # positions are int32
    "sliding_window": 2**31 - 1,
    "num_local_experts": 2**14,
    "num_experts_per_tok": 2**14,
}


def read_config(folder: str | Path) -> dict[str, Any]:
    """The folder's config.json as it stands. Refuses a folder without a readable one."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise UserError(f"expected a model folder with config.json, got {folder}; check the path")
    return read_json_object(path, cure="restore the file")


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """A config.json's content → ModelConfig. Raises UserError for an architecture or a feature that
    the decoder does not have, naming it; a key that is null, false or empty is off."""
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        raise UserError(_unknown_architecture(shown(names)))
    for name in names:
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise UserError(_unknown_architecture(shown(name).strip("'")))
    for name, (family, read) in ARCHITECTURES.items():
        if raw.get("model_type") == family and names in ([], [name]):
            return read(raw)
    raise UserError(_unknown_architecture(f"model_type {shown(raw.get('model_type'))} of {names}"))


def ignored_keys(raw: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json that `model_config` reads past and that say nothing about this model,
    sorted: of training, of another program, of another rope type."""
    top = {key for key in IGNORED_KEYS if not _is_off(raw.get(key))}
    rope = rope_dictionary(raw)
    unread = set(rope) - read_rope_keys(rope.get("rope_type", "default"))
    return sorted(top | {f"rope {key}" for key in unread})


def _unknown_architecture(name: str) -> str:
    return f"expected an architecture of {', '.join(ARCHITECTURES)}, got {name}; use one of them"


def _decoder(
    raw: Mapping[str, Any],
    keys: frozenset[str],
    *,
    kinds: Sequence[str] = (),
    context: int = 2048,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    **features: Any,
) -> ModelConfig:
    """What every family has, and `features` of ModelConfig beside it.

    Args:
        keys: those that the family's reader reads besides `COMMON_KEYS`.
        kinds: of the layers, where the file does not say.
        context, kv_heads, head_dim: the family's in transformers, where the file lacks the key.
    """
    _refuse_unknown_keys(raw, COMMON_KEYS | keys)
    _expect(raw, "hidden_act", "silu", ("silu", "swish"))
    _expect(raw, "attention_dropout", 0.0, (0.0,))
    heads = _whole(raw, "num_attention_heads")
    hidden_size = _whole(raw, "hidden_size")
    raw = {"num_key_value_heads": kv_heads, "head_dim": head_dim, **raw}
    kv_heads = _whole(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(
            f"expected num_attention_heads to be a multiple of num_key_value_heads, got {heads} "
            f"and {kv_heads}; correct config.json"
        )
    if raw.get("head_dim") is None and hidden_size % heads:
        raise UserError(
            f"expected hidden_size to be a multiple of num_attention_heads, got {hidden_size} and "
            f"{heads}; state head_dim in config.json"
        )
    head_dim = _whole(raw, "head_dim", hidden_size // heads)
    if head_dim % 2:
        raise UserError(f"expected an even head_dim, got {head_dim}; correct config.json")
    context = _whole(raw, "max_position_embeddings", context)
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
        initializer_range=_number(raw, "initializer_range", 0.02),
        rope=read_rope(raw, context, head_dim),
        layer_types=_layer_types(raw, kinds),
        **features,
    )


def _llama(raw: Mapping[str, Any]) -> ModelConfig:
    bias = _switch(raw, "attention_bias")
    return _decoder(
        raw,
        LLAMA_KEYS,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=_switch(raw, "mlp_bias"),
    )


def _mistral(raw: Mapping[str, Any]) -> ModelConfig:
    """All layers slide where there is a window; where the key is missing there is one of 4096."""
    window = _window(raw, 4096)
    kinds = ["full_attention" if window is None else "sliding_attention"]
    depth = _whole(raw, "num_hidden_layers")
    if _layer_types(raw, kinds * depth) != (*kinds * depth,):  # which transformers ignores
        raise UserError(f"expected layer_types of {kinds[0]} for Mistral; use another model")
    return _decoder(
        raw, MISTRAL_KEYS, kinds=kinds * depth, context=131072, kv_heads=8, sliding_window=window
    )


def _qwen2(raw: Mapping[str, Any]) -> ModelConfig:
    return _qwen(raw, QWEN2_KEYS, attention_bias=True)


def _qwen3(raw: Mapping[str, Any]) -> ModelConfig:
    bias = _switch(raw, "attention_bias")
    features = {"attention_bias": bias, "output_bias": bias, "qk_norm": True}
    return _qwen(raw, QWEN3_KEYS, head_dim=128, **features)


def _qwen(raw: Mapping[str, Any], keys: frozenset[str], **features: Any) -> ModelConfig:
    """With use_sliding_window, the layers from max_window_layers on slide."""
    window = _window(raw, 4096) if _switch(raw, "use_sliding_window") else None
    first = _value(raw, "max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise UserError(
            f"expected a whole number for 'max_window_layers', got {shown(first)}; "
            "correct config.json"
        )
    depth = _whole(raw, "num_hidden_layers")
    full = depth if window is None else min(first, depth)
    kinds = ["full_attention"] * full + ["sliding_attention"] * (depth - full)
    return _decoder(
        raw, keys, kinds=kinds, context=32768, kv_heads=32, sliding_window=window, **features
    )


def _seed_oss(raw: Mapping[str, Any]) -> ModelConfig:
    """A Llama whose q, k and v have biases. Dropout, which its files have, is of its training."""
    return _decoder(
        {**raw, "attention_dropout": 0.0},
        SEED_OSS_KEYS,
        context=524288,
        kv_heads=8,
        head_dim=128,
        attention_bias=_switch({"attention_bias": True, **raw}, "attention_bias"),
        output_bias=_switch(raw, "attention_out_bias"),
        mlp_bias=_switch(raw, "mlp_bias"),
    )


def _gpt_oss(raw: Mapping[str, Any]) -> ModelConfig:
    """Layers slide in turn, the first one does; weights may be MXFP4 (`hf.mxfp4`)."""
    packing = _value(raw, "quantization_config", {"quant_method": "mxfp4"})
    if not isinstance(packing, dict) or packing.get("quant_method") != "mxfp4":
        raise UserError(
            f"expected a quantization_config of mxfp4, got {shown(packing)}; use other weights"
        )
    rope = rope_dictionary(raw)
    missing = GPT_OSS_ROPE if set(rope) <= {"rope_theta"} else {"rope_theta": 150000.0}
    raw = {**raw, "rope_scaling": None, "rope_parameters": {**missing, **rope}}
    experts = _whole(raw, "num_local_experts", 128)
    chosen = _whole(raw, "num_experts_per_tok", 4)
    if chosen > experts:
        raise UserError(
            f"expected num_experts_per_tok of at most num_local_experts {experts}, got {chosen}; "
            "correct config.json"
        )
    turn = ["sliding_attention", "full_attention"]
    bias = _switch({"attention_bias": True, **raw}, "attention_bias")
    return _decoder(
        {"rms_norm_eps": 1e-5, **raw},
        GPT_OSS_KEYS,
        kinds=[turn[layer % 2] for layer in range(_whole(raw, "num_hidden_layers"))],
        context=131072,
        kv_heads=8,
        head_dim=64,
        attention_bias=bias,
        output_bias=bias,
        sliding_window=_window(raw, 128),
        attention_sinks=True,
        num_local_experts=experts,
        num_experts_per_tok=chosen,
        swiglu_alpha=_number(raw, "swiglu_alpha", 1.702),
        swiglu_limit=_number(raw, "swiglu_limit", 7.0),
    )


def _window(raw: Mapping[str, Any], default: int) -> int | None:
    """None where the file says null; the default where it says nothing."""
    if raw.get("sliding_window", default) is None:
        return None
    return _whole(raw, "sliding_window", default)


def _layer_types(raw: Mapping[str, Any], kinds: Sequence[str]) -> tuple[str, ...]:
    found = _value(raw, "layer_types", list(kinds))
    if not isinstance(found, list) or not all(isinstance(kind, str) for kind in found):
        raise UserError(
            f"expected layer_types as a list of names, got {found!r}; correct config.json"
        )
    return tuple(found)


# HF class name → (model_type, reader). A new family is a line here and a function above.
ARCHITECTURES: dict[str, tuple[str, Callable[[Mapping[str, Any]], ModelConfig]]] = {
    "GptOssForCausalLM": ("gpt_oss", _gpt_oss),
    "LlamaForCausalLM": ("llama", _llama),
    "MistralForCausalLM": ("mistral", _mistral),
    "Qwen2ForCausalLM": ("qwen2", _qwen2),
    "Qwen3ForCausalLM": ("qwen3", _qwen3),
    "SeedOssForCausalLM": ("seed_oss", _seed_oss),
}


def _is_off(value: Any) -> bool:
    return value is None or value is False or value == {} or value == []


def _refuse_unknown_keys(raw: Mapping[str, Any], known: frozenset[str]) -> None:
    known = known | NEUTRAL_KEYS | IGNORED_KEYS
    for key, value in raw.items():
        if not (_is_off(value) or key in known or key.startswith("_")):
            raise UserError(
                f"expected a config.json that the decoder knows, got {shown(key)}: {shown(value)}; "
                "use another model, or take the key out if it does not change the numbers"
            )


def _expect(raw: Mapping[str, Any], key: str, default: Any, allowed: tuple) -> None:
    value = _value(raw, key, default)
    if value not in allowed:
        raise UserError(f"expected {key} {allowed[0]!r}, got {shown(value)}; use a model with that")


def _value(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    value = raw.get(key)
    return default if value is None else value


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = _value(raw, key, default)
    # Normal numbers of fp32, in which it is used; JSON has ints of any length.
    if not is_number(value) or not 2**-126 <= value < 2**127:
        raise UserError(
            f"expected a number above 0 for {key!r}, got {shown(value)}; correct config.json"
        )
    return float(value)


def _switch(raw: Mapping[str, Any], key: str) -> bool:
    value = _value(raw, key, False)
    if not isinstance(value, bool):
        raise UserError(
            f"expected true or false for {key!r}, got {shown(value)}; correct config.json"
        )
    return value


def _whole(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _value(raw, key, default)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 1 <= value <= LARGEST[key]:
        raise UserError(
            f"expected a positive whole number for {key!r}, at most {LARGEST[key]}, got "
            f"{shown(value)}; correct config.json"
        )
    return value
