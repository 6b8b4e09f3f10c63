"""A GGUF file's metadata and tensors, and its tokenizer as the files that a Hugging Face folder has
of it.

Both backends write them from here, so that a student's folder has the same tokenizer, byte for
byte, whichever trained it. The container is read here and not by the gguf package's reader: every
count is held against the bytes that are left before anything is made of it.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import contextlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jax_distill.base.errors import UserError
from jax_distill.base.json_object import DAMAGE, one_line, shown, token_ids
from jax_distill.data.tokenizer import library_errors

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

# Value type → struct's letter; 7 is a bool, 8 text, 9 an array.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9
MAX_DIMENSIONS = 4
MAX_COUNT = 2**24  # of keys, tensors, elements of a metadata array; vocabularies have 2^18


class GgufTensor(NamedTuple):
    """shape: outermost first. data: uint8 [*shape[:-1], bytes of a row], in the file."""

    name: str
    tensor_type: Any
    shape: tuple[int, ...]
    data: np.ndarray


class GgufFile(NamedTuple):
    """metadata: key → number, text, bool or a list of one of them."""

    metadata: dict[str, Any]
    tensors: list[GgufTensor]


@contextlib.contextmanager
def gguf_errors(path: Path | str) -> Iterator[None]:
    """Whatever is wrong with a GGUF file is one line that names it."""
    try:
        yield
    except DAMAGE as error:
        raise UserError(
            f"expected a GGUF file {path}, got {one_line(error)}; re-download it"
        ) from error


def open_gguf(path: Path) -> GgufFile:
    """A GGUF file, version 2 or 3, little-endian. Its tensors stay in the file until looked at.

    Raises:
        UserError: the extra `gguf` is missing; the file is broken: a count or an offset that leads
            out of it, tensors that do not follow each other, a key twice, text that is not UTF-8.
    """
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise UserError(
            f"expected the gguf package to read {path.name}, got none; "
            "pip install 'jax-distill[gguf]'"
        ) from error
    with gguf_errors(path):
        data = np.memmap(path, mode="r")
        header = _Header(data)
        tensor_count, metadata = header.metadata()
        entries = [header.tensor() for _ in range(tensor_count)]
        names = [entry[0] for entry in entries]
        if len(set(names)) < len(names):
            raise ValueError("a tensor twice")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment {shown(alignment)}")
        start = _aligned(header.position, alignment)
        expected = 0
        tensors = []
        for name, shape, number, offset in entries:
            kind = GGMLQuantizationType(number)
            block, size = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise ValueError(
                    f"{shown(name)} with rows of {shape[-1]}, not a multiple of {block}"
                )
            row = shape[-1] // block * size
            length = math.prod(shape[:-1]) * row
            # As llama.cpp demands: each where the one before it ends.
            if offset != expected or start + offset + length > data.size:
                raise ValueError(f"{shown(name)} at {offset} of {length} bytes: not in its place")
            part = data[start + offset : start + offset + length]
            tensors.append(GgufTensor(name, kind, shape, part.reshape(*shape[:-1], row)))
            expected = _aligned(offset + length, alignment)
        return GgufFile(metadata, tensors)


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


class _Header:
    """The front of a file, read from byte to byte; nothing is taken that is not there."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data
        self.position = 0

    def _take(self, size: int) -> bytes:
        end = self.position + size
        if end > self._data.size:
            raise ValueError(f"an end at byte {self._data.size} inside of its header")
        found = self._data[self.position : end].tobytes()
        self.position = end
        return found

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]

    def _text(self) -> str:
        return self._take(self._number("Q")).decode("utf-8")

    def _count(self) -> int:
        """Of things that each take bytes of the file, so it ends where the file does."""
        count = self._number("Q")
        if count > MAX_COUNT:
            raise ValueError(f"a count of {count}")
        return count

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind == BOOL:
            value = self._number("B")
            if value > 1:
                raise ValueError(f"a bool of {value}")
            return bool(value)
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        raise ValueError(f"a value of type {kind}")

    def _array(self) -> list[Any]:
        kind = self._number("I")
        if kind in NUMBERS:
            letters = f"<{self._count()}{NUMBERS[kind]}"
            return list(struct.unpack(letters, self._take(struct.calcsize(letters))))
        return [self._value(kind) for _ in range(self._count())]

    def metadata(self) -> tuple[int, dict[str, Any]]:
        """(how many tensors follow, key → value)."""
        if self._take(4) != b"GGUF":
            raise ValueError("another kind of file")
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} (2 and 3 are read, little-endian)")
        tensors = self._count()
        found: dict[str, Any] = {}
        for _ in range(self._count()):
            key, kind = self._text(), self._number("I")
            if key in found:
                raise ValueError(f"the key {shown(key)} twice")
            found[key] = self._array() if kind == ARRAY else self._value(kind)
        return tensors, found

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape, type, offset) of the next one."""
        name = self._text()
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"{shown(name)} of {dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        if min(shape) < 1:
            raise ValueError(f"{shown(name)} of shape {shape}")
        return name, shape, self._number("I"), self._number("Q")


def gguf_metadata(file: GgufFile) -> dict[str, Any]:
    """The file's keys and their values."""
    return file.metadata


def special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """`bos_token_id` and so on, as config.json and generation_config.json call them."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    length = len(required(metadata, "tokenizer.ggml.tokens"))
    found = {}
    for name, key in names.items():
        key = f"tokenizer.ggml.{key}_token_id"
        ids = token_ids(metadata.get(key), length, key)
        if len(ids) == 1:
            found[f"{name}_token_id"] = ids[0]
    return found


def write_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json (the special ids).

    Byte-level BPE only; raises UserError for another kind, naming it.
    """
    kind, pre = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind != "gpt2" or not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise UserError(
            f"expected a byte-level BPE tokenizer cut like {' or '.join(PRE_TOKENIZERS)}, got "
            f"tokenizer.ggml.model {shown(kind)}, pre {shown(pre)}; use the model's Hugging Face "
            "folder"
        )
    tokens, merges = (_texts(metadata, f"tokenizer.ggml.{key}") for key in ("tokens", "merges"))
    kinds = required(metadata, "tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens) or len(set(tokens)) < len(tokens):
        raise UserError(
            f"expected {len(tokens)} different tokens, each with its type, in the GGUF file, got "
            f"{len(set(tokens))} and {shown(kinds)}; re-download it"
        )
    with library_errors("the GGUF file's tokenizer"):
        pairs = []
        for merge in merges:
            first, second = merge.split(" ")
            pairs.append((first, second))
        tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, pairs))
        tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
        tokenizer.decoder = decoders.ByteLevel()
        for wanted, add in (
            (CONTROL, tokenizer.add_special_tokens),
            (USER_DEFINED, tokenizer.add_tokens),
        ):
            add(
                [
                    AddedToken(text, special=wanted == CONTROL, normalized=False)
                    for text, kind in zip(tokens, kinds, strict=True)
                    if kind == wanted
                ]
            )
        named = _named_tokens(metadata, tokens)
        if _value_of(metadata, "tokenizer.ggml.add_bos_token", bool, False):
            bos = required(named, "bos_token")
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A {bos} $B",
                special_tokens=[(bos, tokenizer.token_to_id(bos))],
            )
        tokenizer.save(str(folder / "tokenizer.json"))
    context = f"{metadata.get('general.architecture')}.context_length"
    required(metadata, context)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _value_of(metadata, context, int, None),
        "clean_up_tokenization_spaces": False,
        **named,
    }
    template = _value_of(metadata, "tokenizer.chat_template", str, None)
    if template is not None:
        settings["chat_template"] = template
    write_json_text(folder / "tokenizer_config.json", settings)
    write_json_text(folder / "generation_config.json", special_ids(metadata))


def write_json_text(path: Path, content: dict[str, Any]) -> None:
    """As the files of a Hugging Face folder are written."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def required(metadata: dict[str, Any], key: str) -> Any:
    """metadata[key]; raises UserError where the file has none."""
    if key not in metadata:
        raise UserError(f"expected {key!r} in the GGUF file, got none; re-download it")
    return metadata[key]


def _value_of(metadata: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    value = metadata.get(key, default)
    if key in metadata and type(value) is not kind:
        raise UserError(
            f"expected {key!r} as {kind.__name__} in the GGUF file, got {shown(value)}; "
            "re-download it"
        )
    return value


def _texts(metadata: dict[str, Any], key: str) -> list[str]:
    values = required(metadata, key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UserError(
            f"expected {key!r} as a list of texts in the GGUF file, got {shown(values)}; "
            "re-download it"
        )
    return values


def _named_tokens(metadata: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    named = {}
    for key, name in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items():
        key = f"tokenizer.ggml.{key}_token_id"
        for token_id in token_ids(metadata.get(key), len(tokens), key)[:1]:
            named[f"{name}_token"] = tokens[token_id]
    return named
