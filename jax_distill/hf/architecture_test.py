"""config.json: what is read, what is refused by name, and the defaults of transformers."""

import pytest

from jax_distill import hf
from jax_distill.base.errors import UserError
from jax_distill.hf_test import RAW, random_tensors, write_folder
from jax_distill.model import RopeConfig


def test_a_missing_or_broken_config_is_refused_with_its_path(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        hf.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="a JSON object in .*config.json"):
        hf.read_config(tmp_path)


@pytest.mark.parametrize(
    "change,named",
    [
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "Llama.*Qwen3.*got Gemma"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"model_type": "qwen2"}, "qwen2"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 33}, "head_dim"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 3}}, "alpha"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps.*got 'small'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps.*got 0.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps.*got nan"),
        ({"initializer_range": True}, "initializer_range.*got True"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings.*got 'false'"),
        ({"rope_theta": 1.0}, "rope_theta' above 1, got 1.0"),
        ({"rope_theta": True}, "rope_theta.*got True"),
        ({"rope_scaling": "yarn"}, "the rope as an object, got 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "factor' above 0, got 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor' above 0, got 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": -2.0}}, "factor' above 0, got -2.0"),
        ({"rope_scaling": {"type": "yarn", "factor": float("inf")}}, "factor.*got inf"),
        ({"rope_scaling": {"type": "yarn", "beta_slow": 0}}, "beta_slow' above 0, got 0"),
        (
            {"rope_scaling": {"type": "yarn"}, "original_max_position_embeddings": "8"},
            "original_max_position_embeddings' above 0, got '8'",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2},
            "head_dim above 2 for rope_type dynamic, got 2",
        ),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "low_freq_factor below high_freq_factor, got 4.0 and 4.0",
        ),
    ],
)
def test_what_the_decoder_does_not_have_is_refused_by_name(change, named):
    """Case 24's kind: never dropped, never loaded as a plain Llama."""
    with pytest.raises(UserError, match=named) as refusal:
        hf.model_config(RAW | change)
    assert "\n" not in str(refusal.value)


QWEN = RAW | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = RAW | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
GPT_OSS = RAW | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}


@pytest.mark.parametrize(
    "raw,change,named",
    [
        (RAW, {"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
        (QWEN, {"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
        (QWEN, {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        (QWEN, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window.*got 0"),
        (QWEN, {"mlp_bias": True}, "mlp_bias"),
        (MISTRAL, {"layer_types": ["full_attention"] * 3}, "sliding_attention for Mistral"),
        (MISTRAL, {"attention_bias": True}, "attention_bias"),
        (GPT_OSS, {"num_experts_per_tok": 4, "num_local_experts": 3}, "at most .* 3, got 4"),
        (GPT_OSS, {"sliding_window": None}, "sliding_window"),
        (GPT_OSS, {"num_local_experts": 0}, "num_local_experts.*got 0"),
        (GPT_OSS, {"quantization_config": {"quant_method": "awq"}}, "mxfp4, got .*awq"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(raw, change, named):
    with pytest.raises(UserError, match=named) as refusal:
        hf.model_config(raw | change)
    assert "\n" not in str(refusal.value)


def test_keys_that_are_off_or_say_nothing_about_the_numbers_are_no_reason_to_refuse():
    more = {
        "_name_or_path": "x",
        "attention_dropout": 0.0,
        "final_logit_softcapping": None,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": [2, 3],
        "pretraining_tp": 1,
    }
    assert hf.model_config(RAW | more) == hf.model_config(RAW)


HARMLESS = [
    ({"max_sequence_length": 2048}, ["max_sequence_length"]),
    ({"model_max_length": 8, "resid_pdrop": 0.1}, ["model_max_length", "resid_pdrop"]),
    ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, ["rope factor"]),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3, "finetuned": True}},
        ["rope beta_fast", "rope finetuned"],
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "finetuned": True}},
        ["rope finetuned"],
    ),
    (
        {
            "rope_scaling": {
                "type": "dynamic",
                "factor": 2.0,
                "original_max_position_embeddings": 16,
            }
        },
        ["rope original_max_position_embeddings"],
    ),
]


@pytest.mark.parametrize("change,ignored", HARMLESS)
def test_keys_that_transformers_does_not_look_at_are_named_as_ignored(
    tmp_path, capsys, change, ignored
):
    """Case 51: the model is that without them."""
    plain = {key: value for key, value in change.items() if key not in ignored}
    for key in ("rope_scaling", "rope_parameters"):
        if key in plain:
            unread = {name.removeprefix("rope ") for name in ignored}
            plain[key] = {k: v for k, v in plain[key].items() if k not in unread}
    assert hf.model_config(RAW | change) == hf.model_config(RAW | plain)
    folder = write_folder(tmp_path / "model", RAW | change, random_tensors())
    for _ in range(2):
        hf.load_model(folder)
    said = capsys.readouterr().out
    assert said == (f"{folder}/config.json: ignored, as transformers does: {', '.join(ignored)}\n")


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 2**31},
        {"hidden_size": 10**400},
        {"vocab_size": -1},
        {"num_attention_heads": True},
        {"max_position_embeddings": 2**31},
        {"rms_norm_eps": 10**400},
        {"rms_norm_eps": 1e-320},
        {"initializer_range": 1e39},
        {"rope_theta": 10**400},
        {"rope_scaling": {"type": "linear", "factor": 1e-320}},
        {"rope_scaling": [["type", "yarn"]]},
        {"rope_scaling": {"type": ["yarn"]}},
        {"rope_scaling": {"type": "yarn"}, "original_max_position_embeddings": {"a": 1}},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": 5},
        {"model_type": ["llama"]},
        {"hidden_act": ["silu"]},
        {"a" * 10_000: "b\n" * 10_000},
    ],
)
def test_a_value_of_another_kind_or_size_is_one_short_line(change):
    with pytest.raises(UserError) as refusal:
        hf.model_config(RAW | change)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 500


def test_defaults_are_those_of_transformers_llama():
    wanted = ("num_key_value_heads", "rope_theta", "rms_norm_eps", "max_position_embeddings")
    config = hf.model_config({key: value for key, value in RAW.items() if key not in wanted})
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert config.rope == RopeConfig(rope_theta=10000.0)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 2048)
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)


def test_both_spellings_of_a_rope_are_one():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"rope_type": "llama3", "original_max_position_embeddings": 32}
    old = hf.model_config(RAW | {"rope_scaling": scaling})
    new = {k: v for k, v in RAW.items() if k != "rope_theta"}
    new |= {"rope_parameters": scaling | {"rope_theta": 500000.0}}
    assert old == hf.model_config(new) == hf.model_config(new | {"rope_scaling": scaling})
    assert old.rope.original_max_position_embeddings == 32


def test_an_original_context_beside_the_rope_wins():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    raw = RAW | {"rope_scaling": scaling, "original_max_position_embeddings": 32}
    assert hf.model_config(raw).rope.original_max_position_embeddings == 32
