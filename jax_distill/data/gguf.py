"""A GGUF file's metadata, and its tokenizer as the files that a Hugging Face folder has of it.

Both backends write them from here, so that a student's folder has the same tokenizer, byte for
byte, whichever trained it.
"""

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


def open_gguf(path: Path) -> Any:
    """gguf's reader of a file. Raises Refusal without the extra `gguf`, and for a broken file."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise Refusal(
            f"expected the gguf package to read {path.name}, got none; "
            "do pip install 'jax-distill[gguf]'"
        ) from error
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise Refusal(f"expected a GGUF file {path}, got {error}; do fetch it again") from error


def gguf_metadata(reader: Any) -> dict[str, Any]:
    """The reader's keys and their values, without those of the container itself."""
    return {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }


def special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """`bos_token_id` and so on, as config.json and generation_config.json call them."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {f"{name}_token_id": f"tokenizer.ggml.{key}_token_id" for name, key in names.items()}
    return {name: metadata[key] for name, key in found.items() if key in metadata}


def write_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json (the special ids).

    Byte-level BPE only; raises Refusal for another kind, naming it.
    """
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
        "model_max_length": required(
            metadata, f"{metadata.get('general.architecture')}.context_length"
        ),
        "clean_up_tokenization_spaces": False,
        **named,
    }
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    write_json_text(folder / "tokenizer_config.json", settings)
    write_json_text(folder / "generation_config.json", special_ids(metadata))


def write_json_text(path: Path, content: dict[str, Any]) -> None:
    """As the files of a Hugging Face folder are written."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
