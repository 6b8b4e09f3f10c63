"""Chat templates: what a conversation reads like, and which part of it the assistant said."""

import json
import os.path
import re
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from jax_distill.config import Refusal

# Unicode noncharacters: no text holds them, so they can mark the assistant's part in the rendering.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
# The day that templates with `strftime_now` see. The real one would change the data every day; this
# is the day that Llama 3.2's own template falls back to.
_TODAY = datetime(2024, 7, 26)

Span = tuple[int, int]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: marks what the assistant said."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    @staticmethod
    def _mark(caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class ChatTemplate:
    """A tokenizer folder's chat template in jinja2's sandbox.

    Args:
        source: the template.
        values: names it may use besides the messages (bos_token, eos_token, …).
        special_tokens: those of the tokenizer: one of them may end an assistant's turn.
    """

    def __init__(self, source: str, *, values: dict[str, str], special_tokens: list[str]):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _TODAY.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise Refusal(f"expected a chat template that jinja2 reads, got {error}") from None
        self._values = values
        self._special_tokens = sorted(filter(None, special_tokens), key=len, reverse=True)

    def render(self, messages: list[dict[str, Any]]) -> tuple[str, list[Span]]:
        """The conversation's text and the spans of it that the assistant said.

        Where the template marks them with `{% generation %}`, those are the spans. Else each
        assistant turn begins where the text of the messages before it, with the assistant's header,
        ends, and ends with the special token that closes the text of the messages up to it (so
        ChatML's newline is not the assistant's), or where that text ends if none does.

        Args:
            messages: dicts with `role` and, as the template wants them, `content` and more.

        Returns:
            text, and (first, end) character spans into it, in order.

        Raises:
            Refusal: messages of another form, the template rejects them, or its text before a turn
                is no beginning of the whole text, so that the turn cannot be found.
        """
        _check(messages)
        text, spans = self._rendered(messages)
        if spans or not any(message["role"] == "assistant" for message in messages):
            return text, spans
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                spans.append(self._turn(text, messages, index))
        return text, spans

    def _turn(self, text: str, messages: list[dict[str, Any]], index: int) -> Span:
        before, _ = self._rendered(messages[:index], header=True)
        upto, _ = self._rendered(messages[: index + 1])
        if self._rendered(messages[:index])[0] == before:  # the template has no header, or always
            if "assistant" in os.path.commonprefix([before[::-1], upto[::-1]])[::-1].lower():
                raise Refusal(
                    "expected a chat template that writes the assistant's header only when "
                    "add_generation_prompt asks for it, this one always does; wrap that part in "
                    "{% if add_generation_prompt %}…{% endif %}"
                )
        bare = upto.rstrip()
        mark = next((token for token in self._special_tokens if bare.endswith(token)), "")
        end = -1
        if text.startswith(upto):
            end = len(bare) if mark else len(upto)
        elif mark and index + 1 < len(messages):  # Qwen3 leaves the thoughts of earlier turns out
            limit = len(self._rendered(messages[: index + 2])[0])
            found = text.find(mark, len(before), limit)
            end = found + len(mark) if found >= 0 else -1
        if not text.startswith(before) or end < len(before):
            raise Refusal(
                f"expected the text of the messages before message {index} to begin the whole text "
                f"of the chat, by this template it does not; mark the assistant's part with "
                f"{{% generation %}} in the template, or give one assistant turn a conversation"
            )
        return len(before), end

    def _rendered(self, messages: list[dict[str, Any]], header: bool = False) -> tuple[str, list]:
        try:
            marked = self._template.render(
                **self._values,
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=header,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise Refusal(f"expected messages that the chat template takes, got {error}") from None
        text, spans = "", []
        for piece in marked.split(_OPEN):
            said, closed, after = piece.partition(_CLOSE)
            if closed:
                spans.append((len(text), len(text) + len(said)))
            text += said + after
        return text, spans


def _check(messages: list[Any]) -> None:
    if not messages:
        raise Refusal("expected a list of messages, got an empty one")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            got = str(message)[:60]
            raise Refusal(f"expected message {index} to have a role and content, got {got!r}")
    text = json.dumps(messages, ensure_ascii=False, default=str)
    if _OPEN in text or _CLOSE in text:
        raise Refusal("expected text, got the Unicode noncharacter U+FDD0 or U+FDD1; remove it")
    if re.search("[\ud800-\udfff]", text):
        raise Refusal("expected Unicode text, got half a surrogate pair; mend the line")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs) -> str:
    """Plain JSON: jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
