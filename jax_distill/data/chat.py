"""Conversations to tokens and targets: what the assistant said, and the mark that ends it."""

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers

from jax_distill.base.errors import UserError
from jax_distill.data.conversation import Conversation, conversation, count_left_out
from jax_distill.data.document import Document
from jax_distill.data.template import LIMITS, Limits, Template
from jax_distill.data.template_worker import HOLE, Span

_LEFT, _RIGHT = "\ufdd3", "\ufdd4"  # around the number of a control token in its other spelling


class Chat:
    """A tokenizer and its chat template.

    Control tokens are the tokenizer's special ones. Where a message's own text holds one ("the end
    mark is <|im_end|>"), it is text: it ends no turn and becomes no control token. For that, a hole
    (a Unicode noncharacter) is put into it before the template renders the message, and afterwards
    the control tokens without a hole, which are the template's own, are encoded by a second
    tokenizer that knows them, and only them, by another spelling.

    Args:
        core: the tokenizer.
        source: the template.
        values: names that the template may use (bos_token, eos_token, …).
        limits: of the template.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        source: str,
        *,
        values: dict[str, str],
        limits: Limits = LIMITS,
    ) -> None:
        self._core = core
        added = core.get_added_tokens_decoder()
        self._special = {token.content: id_ for id_, token in added.items() if token.special}
        if re.search(f"[\ufdd0-{_RIGHT}]", source):
            raise UserError("expected a chat template without noncharacters U+FDD0 to U+FDD4")
        self._template = Template(
            source, values=values, special_tokens=list(self._special), limits=limits
        )
        words = sorted((word for word in self._special if len(word) > 1), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, words)) or "(?!)")

    def check(self) -> None:
        """Raise UserError now if the template does not parse."""
        self._template.check()

    def close(self) -> None:
        """End the template's process; a later document starts another one."""
        self._template.close()

    def document(
        self,
        messages: list[Any],
        tools: list[Any] | None = None,
        counts: Counter[str] | None = None,
    ) -> Document:
        """A conversation as the template writes it; what the assistant said is a target.

        A token is a target when it has a character of an assistant turn: its content and the mark
        that ends it, not its header. One that begins in the header and ends in the answer belongs
        to the answer, as in transformers' mask. Messages of weight 0 are no targets. BOS and EOS
        are the template's own business, none is added.

        Args:
            messages: dicts with `role`, `content` and what else the template reads.
            tools: JSON Schemas of functions.
            counts: what is changed or left out is counted here, in words.

        Raises:
            UserError: messages of another form; see also `Template.render`.
        """
        counts = Counter() if counts is None else counts
        given = conversation(messages, tools, self._template.source, counts)
        given = self._with_holes(given, counts)
        text, spans = self._template.render(given.messages, given.tools)
        count_left_out(given, text, counts)
        spans = _learned(spans, given.learned)
        if HOLE in text:
            return self._encode_with_holes(text, spans, counts)
        return _document(self._core.encode(text, add_special_tokens=False), spans)

    def _with_holes(self, given: Conversation, counts: Counter[str]) -> Conversation:
        found = 0

        def protect(text: str) -> str:
            nonlocal found
            text, count = self._control.subn(lambda m: m[0][0] + HOLE + m[0][1:], text)
            found += count
            return text

        messages = [
            {
                key: value if key == "role" else _mapped(value, protect)
                for key, value in each.items()
            }
            for each in given.messages
        ]
        tools = _mapped(given.tools, protect)
        counts["control tokens in messages, read as text"] += found
        return given._replace(messages=messages, tools=tools)

    def _encode_with_holes(self, text: str, spans: list[Span], counts: Counter[str]) -> Document:
        """The document of a text in which holes mark the control tokens that are text."""
        pieces, begins, moves, last, length = [], [0], [0], 0, 0
        for match in re.finditer(f"{HOLE}|{self._control.pattern}", text):
            own = match[0]
            spelled = "" if own == HOLE else f"{_LEFT}{self._special[own]}{_RIGHT}"
            pieces += [text[last : match.start()], spelled]
            last = match.end()
            length += len(pieces[-2]) + len(spelled)
            begins.append(last)
            moves.append(length - last)
        pieces.append(text[last:])

        def moved(position: int) -> int:
            return position + moves[bisect_right(begins, position) - 1]

        core, original = self._respelled
        encoding = core.encode("".join(pieces), add_special_tokens=False)
        document = _document(encoding, [(moved(first), moved(end)) for first, end in spans])
        tokens = document.tokens
        kept = np.isin(tokens, self._ids_in_model)
        counts["control tokens in messages, which the tokenizer cannot read as text"] += int(
            kept.sum()
        )
        ids = np.array([original.get(token, token) for token in tokens.tolist()], np.int32)
        return Document(ids, document.targets)

    @cached_property
    def _respelled(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer that knows the control tokens by another spelling; its ids of them → ids."""
        description = json.loads(self._core.to_str())
        added = {token["content"]: token for token in description["added_tokens"]}
        for word, token in added.items():
            if self._control.fullmatch(word):
                token["content"] = f"{_LEFT}{token['id']}{_RIGHT}"
        core = tokenizers.Tokenizer.from_str(json.dumps(description))
        ids = ((core.token_to_id(token["content"]), token["id"]) for token in added.values())
        return core, {new: old for new, old in ids if new is not None and new != old}

    @cached_property
    def _ids_in_model(self) -> np.ndarray:
        """Ids of control tokens that the tokenizer's model may give to a text, too."""
        model = self._core.get_vocab(with_added_tokens=False)
        return np.array([id_ for word, id_ in self._special.items() if word in model], np.int64)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed, the keys of objects left."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    return value


def _learned(spans: list[Span], learned: list[bool]) -> list[Span]:
    """The spans of the assistant's messages that are to be learned."""
    if all(learned):
        return spans
    if len(spans) != len(learned):
        raise UserError(
            f"expected a chat template that marks each of {len(learned)} assistant messages once, "
            f"as one of them has weight 0, got {len(spans)} marks; leave the weights out, or mark "
            "one {% generation %} part a message"
        )
    return [span for span, wanted in zip(spans, learned, strict=True) if wanted]


def _document(encoding: tokenizers.Encoding, spans: list[Span]) -> Document:
    """Targets are the tokens with a character in a span; one of no characters, where it stands."""
    targets = np.zeros(len(encoding.ids), bool)
    if spans:
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        for first, end in spans:
            targets |= (starts < end) & ((ends > first) | (starts >= first))
    return Document(np.array(encoding.ids, np.int32), targets)
