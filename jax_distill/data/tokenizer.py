"""A tokenizer folder: tokenizer.json, and what tokenizer_config.json says about it."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jax_distill.base.errors import UserError
from jax_distill.base.json_object import DAMAGE, one_line, read_json_object, shown, token_ids
from jax_distill.data.chat import Chat

END_OF_TEXT = "<|endoftext|>"
# Who says what the special tokens are, the last word first; a null says nothing. The ids of the two
# model files count where no token is named.
SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
ID_FILES = ("config.json", "generation_config.json")


@contextlib.contextmanager
def library_errors(what: Path | str) -> Iterator[None]:
    """Whatever the tokenizers library makes of a damaged tokenizer is one line that names it: it
    raises bare Exceptions, and where its Rust code gives up, a BaseException."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(
                f"{what}: expected a tokenizer, got {one_line(error)}; re-download it"
            ) from None
        raise


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
        control_ids: of the special tokens, [n] int64: what a text may hold only as marks.
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
        added = core.get_added_tokens_decoder()
        self.control_ids = np.array(sorted(i for i, t in added.items() if t.special), np.int64)
        if self.length >= 2**31:
            raise UserError(f"{folder}: expected token ids below 2^31, got {self.length - 1}")
        self.bos_id = self._special_id(settings, "bos_token")
        self.eos_id = self._special_id(settings, "eos_token")
        begin = core.encode("", add_special_tokens=True).ids
        adds = settings.get("add_bos_token")
        if not isinstance(adds, bool | None):
            raise UserError(
                f"{folder}: expected add_bos_token true or false, got {shown(adds)}; "
                "correct tokenizer_config.json"
            )
        self.adds_bos = self.bos_id is not None and (
            begin[:1] == [self.bos_id] if adds is None else adds
        )
        self._chat_source = _chat_source(folder, settings)
        self._chat_values = {
            key: _content(value)
            for key, value in settings.items()
            if key.endswith("_token") and isinstance(_content(value), str)
        }

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Reads a folder (or a tokenizer.json in one).

        BOS and EOS are the tokens that tokenizer_config.json names, else special_tokens_map.json,
        else the first of the ids in config.json, else in generation_config.json.

        Raises:
            UserError: no tokenizer.json there, or a file that does not parse; an id that is none.
        """
        folder = Path(folder)
        folder = folder.parent if folder.name == "tokenizer.json" else folder
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(
                f"expected {file}, it is not there; give data.tokenizer a folder that has one, or "
                f"bpe:2048 to train one on the text"
            )
        settings: dict[str, Any] = {}
        for name in SETTINGS_FILES:
            for key, value in _read_if_there(folder / name).items():
                if _content(settings.get(key)) is None:
                    settings[key] = value
        with library_errors(file):
            core = tokenizers.Tokenizer.from_file(str(file))
            length = 1 + max(core.get_vocab(with_added_tokens=True).values(), default=-1)
            for name in ID_FILES:
                found = _read_if_there(folder / name)
                for key in ("bos_token", "eos_token"):
                    if _content(settings.get(key)) is None and not settings.get(f"{key}_id"):
                        where = f"{folder / name}: {key}_id"
                        settings[f"{key}_id"] = token_ids(found.get(f"{key}_id"), length, where)
            return cls(folder, core, settings)

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, nothing added before or after it: [n] int32."""
        with library_errors(self.folder):
            return np.array(self._core.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of many texts on all cores."""
        with library_errors(self.folder):
            encodings = self._core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of token ids, special tokens included."""
        return self._core.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)

    @functools.cached_property
    def chat(self) -> Chat:
        """The folder's own chat template.

        Raises:
            UserError: no template in the folder.
        """
        if self._chat_source is None:
            raise UserError(
                f"{self.folder}: expected a chat template, got none; put chat_template.jinja "
                f"beside tokenizer.json, or use a tokenizer that has one"
            )
        return Chat(self._core, self._chat_source, values=self._chat_values)

    @property
    def conventions(self) -> tuple[int | None, int | None, bool, str | None]:
        """What a text is made with besides its ids: BOS, EOS, whether BOS comes first, the chat
        template. Two tokenizers with equal ids may differ in it."""
        return self.bos_id, self.eos_id, self.adds_bos, self._chat_source

    @functools.cached_property
    def fingerprint(self) -> str:
        ordered = sorted((id_, token) for token, id_ in self.vocab.items())
        return hashlib.sha256(json.dumps(ordered, ensure_ascii=True).encode()).hexdigest()

    @functools.cached_property
    def files_hash(self) -> str:
        digest = hashlib.sha256((self.folder / "tokenizer.json").read_bytes())
        digest.update(repr(self.conventions).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def _special_id(self, settings: dict[str, Any], name: str) -> int | None:
        token = _content(settings.get(name))
        if token is None:
            return next(iter(settings.get(f"{name}_id") or ()), None)
        if not isinstance(token, str) or token not in self.vocab:
            raise UserError(
                f"{self.folder}: expected {name} to be a token of tokenizer.json, got "
                f"{shown(token)}; correct tokenizer_config.json"
            )
        return self.vocab[token]


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path) -> None:
    """Trains a byte-level BPE and writes tokenizer.json and tokenizer_config.json.

    `<|endoftext|>` (id 0) is BOS and EOS; no BOS is put before a text. The same texts give the same
    files, byte for byte.

    Raises:
        UserError: vocab_size below 257: a byte-level vocabulary has 256 bytes and the end.
    """
    if vocab_size < 257:
        raise UserError(f"expected a vocabulary of at least 257, got {vocab_size}; 2048 is a start")
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


def _read_if_there(file: Path) -> dict[str, Any]:
    return read_json_object(file, cure="restore the file") if file.exists() else {}


def _content(value: Any) -> Any:
    """A special token stands as a string, or as an object with `content`."""
    return value.get("content") if isinstance(value, dict) else value


def _chat_source(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except DAMAGE as error:
            raise UserError(
                f"expected a chat template in {file}, got {one_line(error)}; restore the file"
            ) from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        try:
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default", next(iter(named.values()), None))
        except DAMAGE as error:
            raise UserError(
                f"{folder}: expected chat templates with name and template, got {one_line(error)}; "
                "correct tokenizer_config.json"
            ) from None
    if not isinstance(template, str | None):
        raise UserError(
            f"{folder}: expected a chat template as text, got {shown(template)}; "
            "correct tokenizer_config.json"
        )
    return template
