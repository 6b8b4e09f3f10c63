"""A tokenizer folder: tokenizer.json, and what tokenizer_config.json says about it."""

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jax_distill.config import Refusal
from jax_distill.data.chat import ChatTemplate
from jax_distill.data.document import Document

END_OF_TEXT = "<|endoftext|>"


def vocabulary_of(folder: Path) -> dict[str, int]:
    """token → id of a model folder's tokenizer; {} where it has none."""
    return Tokenizer.load(folder).vocab if (folder / "tokenizer.json").is_file() else {}


class Tokenizer:
    """Text to token ids and back, as the folder's own files say.

    Attributes:
        vocab: token → id, added tokens included.
        length: 1 + the largest id; a model's head may be padded beyond it.
        bos_id, eos_id: or None where the folder names none.
        adds_bos: whether this tokenizer puts BOS before a text.
        fingerprint: sha256 of the sorted id → token map.
        files_hash: sha256 of every file that decides what comes out of it.
    """

    def __init__(self, folder: Path, core: tokenizers.Tokenizer, settings: dict[str, Any]):
        self.folder = folder
        self._core = core
        core.no_truncation()
        core.no_padding()
        self.vocab: dict[str, int] = core.get_vocab(with_added_tokens=True)
        self.length = 1 + max(self.vocab.values(), default=-1)
        self.bos_id = self._special_id(settings, "bos_token")
        self.eos_id = self._special_id(settings, "eos_token")
        begin = core.encode("", add_special_tokens=True).ids
        adds = settings.get("add_bos_token")
        self.adds_bos = self.bos_id is not None and (
            begin[:1] == [self.bos_id] if adds is None else bool(adds)
        )
        self._chat_source = _chat_source(folder, settings)
        self._chat_values = {
            key: _content(value)
            for key, value in settings.items()
            if key.endswith("_token") and isinstance(value, str | dict)
        }
        self._special_tokens = [
            token.content for token in core.get_added_tokens_decoder().values() if token.special
        ]

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Reads a folder (or a tokenizer.json in one).

        BOS and EOS come from tokenizer_config.json, else special_tokens_map.json, else config.json.

        Raises:
            Refusal: no tokenizer.json there, or a file that does not parse.
        """
        folder = Path(folder)
        folder = folder.parent if folder.name == "tokenizer.json" else folder
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise Refusal(
                f"expected {file}, it is not there; give data.tokenizer a folder that has one, or "
                f"bpe:2048 to train one on the text"
            )
        try:
            core = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise Refusal(f"{file}: expected a tokenizer, got {error}; save it anew") from None
        config = _read_json(folder / "config.json")
        settings: dict[str, Any] = {
            key: config.get(key) for key in ("bos_token_id", "eos_token_id")
        }
        settings.update(_read_json(folder / "special_tokens_map.json"))
        settings.update(_read_json(folder / "tokenizer_config.json"))
        return cls(folder, core, settings)

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, nothing added before or after it: [n] int32."""
        return np.array(self._core.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of many texts on all cores."""
        encodings = self._core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of token ids, special tokens shown."""
        return self._core.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)

    def chat(self, messages: list[dict[str, Any]]) -> Document:
        """A conversation in the folder's own chat template; what the assistant said is a target.

        A token is a target when it begins inside an assistant turn: its content and the mark that
        ends it, not its header. BOS and EOS are the template's own business, none is added.

        Raises:
            Refusal: no template in the folder, messages without role, or see `ChatTemplate.render`.
        """
        text, spans = self._template.render(messages)
        encoding = self._core.encode(text, add_special_tokens=False)
        targets = np.zeros(len(encoding.ids), bool)
        if spans:
            starts = np.array([start for start, _ in encoding.offsets], np.int64)
            for first, end in spans:
                targets |= (starts >= first) & (starts < end)
        return Document(np.array(encoding.ids, np.int32), targets)

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        if self._chat_source is None:
            raise Refusal(
                f"{self.folder}: expected a chat template, got none; put chat_template.jinja "
                f"beside tokenizer.json, or use a tokenizer that has one"
            )
        return ChatTemplate(
            self._chat_source, values=self._chat_values, special_tokens=self._special_tokens
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        ordered = sorted((id_, token) for token, id_ in self.vocab.items())
        return hashlib.sha256(json.dumps(ordered, ensure_ascii=True).encode()).hexdigest()

    @functools.cached_property
    def files_hash(self) -> str:
        digest = hashlib.sha256((self.folder / "tokenizer.json").read_bytes())
        digest.update(repr((self.bos_id, self.eos_id, self.adds_bos, self._chat_source)).encode())
        return digest.hexdigest()

    def _special_id(self, settings: dict[str, Any], name: str) -> int | None:
        token = _content(settings.get(name))
        if token is None:
            ids = settings.get(f"{name}_id")  # one, several or none
            first = ids[0] if isinstance(ids, list) and ids else ids
            return first if isinstance(first, int) else None
        if token not in self.vocab:
            raise Refusal(
                f"{self.folder}: expected {name} to be a token of tokenizer.json, got {token!r}; "
                f"mend tokenizer_config.json"
            )
        return self.vocab[token]


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path) -> None:
    """Trains a byte-level BPE and writes tokenizer.json and tokenizer_config.json.

    `<|endoftext|>` (id 0) is BOS and EOS; no BOS is put before a text. The same texts give the same
    files, byte for byte.

    Raises:
        Refusal: vocab_size below 257: a byte-level vocabulary has 256 bytes and the end.
    """
    if vocab_size < 257:
        raise Refusal(f"expected a vocabulary of at least 257, got {vocab_size}; 2048 is a start")
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise Refusal(f"{file}: expected a JSON object, got {error}; mend the file") from None


def _content(value: Any) -> Any:
    """A special token stands as a string, or as an object with `content`."""
    return value.get("content") if isinstance(value, dict) else value


def _chat_source(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", next(iter(named.values()), None))
    return template
