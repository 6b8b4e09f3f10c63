"""A GGUF file's tokenizer → tokenizer.json and tokenizer_config.json."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jax_distill.config import Refusal

CONTROL, USER_DEFINED = 3, 4  # token types of GGUF that stand for whole, unsplit strings

# tokenizer.ggml.pre → how text is cut before the merges. GGUF says only the name.
PRE_TOKENIZERS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
}


def write_tokenizer(folder: Path, metadata: dict[str, Any], *, context: int) -> None:
    """Write both files. Byte-level BPE only; raises Refusal for another kind, naming it."""
    kind, pre = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise Refusal(
            f"expected a byte-level BPE tokenizer cut like {' or '.join(PRE_TOKENIZERS)}, got "
            f"tokenizer.ggml.model {kind!r}, pre {pre!r}; do use the model's Hugging Face folder"
        )
    tokens, kinds = (
        required(metadata, f"tokenizer.ggml.{key}") for key in ("tokens", "token_type")
    )
    merges = [tuple(merge.split(" ")) for merge in required(metadata, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    whole = {
        kind: [
            AddedToken(text, special=kind == CONTROL, normalized=False)
            for text, other in zip(tokens, kinds, strict=True)
            if other == kind
        ]
        for kind in (CONTROL, USER_DEFINED)
    }
    tokenizer.add_special_tokens(whole[CONTROL])
    tokenizer.add_tokens(whole[USER_DEFINED])
    named = _named_tokens(metadata)
    if metadata.get("tokenizer.ggml.add_bos_token"):
        bos = required(named, "bos_token")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **named,
    }
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def required(metadata: dict[str, Any], key: str) -> Any:
    """metadata[key]; raises Refusal where the file has none."""
    if key not in metadata:
        raise Refusal(f"expected {key!r} in the GGUF file, got none; do fetch it again")
    return metadata[key]


def _named_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    named = {}
    for key, name in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            named[f"{name}_token"] = metadata["tokenizer.ggml.tokens"][token_id]
    return named
