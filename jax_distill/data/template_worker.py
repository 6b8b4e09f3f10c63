"""The process that renders chat templates: a model folder's template is a program of somebody else.

Run as a file of its own, so that it starts with jinja2 and the standard library alone. A line of
JSON in, a line of JSON out: first what `main` reads, then one conversation after the other. Memory
and output are bounded, and so is the processor time of each answer: SIGPROF ends the process then.
Processor time, not the clock: a busy machine changes no outcome.
"""

import json
import os.path
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

# Unicode noncharacters: no text holds them, so they can mark the assistant's part in the rendering.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
HOLE = "\ufdd2"  # stands inside a control token that somebody wrote into a message, see chat.py
# The day that templates with `strftime_now` see. The real one would change the data every day; this
# is the day that Llama 3.2's own template falls back to.
_TODAY = datetime(2024, 7, 26)

Span = tuple[int, int]


class Refusal(Exception):
    """A conversation or a template that cannot be rendered; the message says why."""


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
        return f"{OPEN}{caller()}{CLOSE}"


class Renderer:
    """A template in jinja2's sandbox.

    Args:
        source: the template.
        values: names it may use besides the messages (bos_token, eos_token, …).
        special_tokens: the longest first: one of them may end an assistant's turn.
        characters: that one rendering may have.
    """

    def __init__(
        self, source: str, *, values: dict[str, str], special_tokens: list[str], characters: int
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=_written,
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _TODAY.strftime
        self._template = environment.from_string(source)
        self._values = values
        self._special_tokens = special_tokens
        self._characters = characters

    def render(self, messages: list[dict[str, Any]], tools: list | None) -> tuple[str, list[Span]]:
        """The conversation's text and the spans of it that the assistant said.

        Where the template marks them with `{% generation %}`, those are the spans. Else each
        assistant turn begins where the text of the messages before it, with the assistant's header,
        ends, and ends with the special token that closes the text of the messages up to it (so
        ChatML's newline is not the assistant's), or where that text ends if none does.

        Raises:
            Refusal: the text before a turn is no beginning of the whole text, so that the turn
                cannot be found.
            Exception: whatever the template raises.
        """
        self._known: dict[tuple[int, bool], tuple[str, list[Span]]] = {}
        self._messages, self._tools = messages, tools
        text, spans = self._rendered(len(messages))
        if spans or not any(message["role"] == "assistant" for message in messages):
            return text, spans
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [self._turn(text, index) for index in turns]

    def _turn(self, text: str, index: int) -> Span:
        before, _ = self._rendered(index, header=True)
        upto, _ = self._rendered(index + 1)
        if self._rendered(index)[0] == before:  # the template has no header, or always
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
        elif mark and index + 1 < len(self._messages):  # Qwen3 leaves out thoughts of earlier turns
            limit = len(self._rendered(index + 2)[0])
            found = text.find(mark, len(before), limit)
            end = found + len(mark) if found >= 0 else -1
        if not text.startswith(before) or end < len(before):
            raise Refusal(
                f"expected the text of the messages before message {index} to begin the whole text "
                f"of the chat, by this template it does not; mark the assistant's part with "
                f"{{% generation %}} in the template, or give one assistant turn a conversation"
            )
        return len(before), end

    def _rendered(self, count: int, header: bool = False) -> tuple[str, list[Span]]:
        """Text and marked spans of the first `count` messages, with the assistant's header or
        not."""
        if (count, header) not in self._known:
            self._known[count, header] = _unmarked(self._generated(count, header))
        return self._known[count, header]

    def _generated(self, count: int, header: bool) -> str:
        pieces, length = [], 0
        for piece in self._template.generate(
            **self._values,
            messages=self._messages[:count],
            tools=self._tools,
            documents=None,
            add_generation_prompt=header,
        ):
            pieces.append(piece)
            length += len(piece)
            if length > self._characters:
                raise Refusal(f"expected a text of at most {self._characters:,} characters")
        return "".join(pieces)


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    text, spans, length = [], [], 0
    for piece in marked.split(OPEN):
        said, closed, after = piece.partition(CLOSE)
        if closed:
            spans.append((length, length + len(said)))
        text += [said, after]
        length += len(said) + len(after)
    return "".join(text), spans


def _written(value: Any) -> Any:
    """What `{{ value }}` writes: text. Python's spelling of other values is no text of a chat."""
    if value is None:
        return ""
    if not isinstance(value, str | int | float | jinja2.Undefined):
        raise TypeError(f"a {type(value).__name__} that is written without tojson")
    return value


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs) -> str:
    """Plain JSON: jinja2's own escapes HTML."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)
    return text.replace("\\ufdd2", HOLE) if ensure_ascii else text


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _problem(error: BaseException) -> str:
    """An exception as the end of "expected …, got"."""
    if isinstance(error, MemoryError):
        return "a template that wants more memory than it may have"
    if isinstance(error, RecursionError):
        return "calls or values nested too deeply"
    known = isinstance(error, jinja2.TemplateError | TypeError)
    return str(error)[:300] if known else f"{type(error).__name__}: {error}"[:300]


def main() -> None:
    """Answer until the input ends."""
    setup = json.loads(sys.stdin.buffer.readline())
    resource.setrlimit(resource.RLIMIT_AS, (setup["memory"], setup["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    renderer: Renderer | None = None
    while line := sys.stdin.buffer.readline():
        signal.setitimer(signal.ITIMER_PROF, setup["seconds"])
        try:
            if renderer is None:
                answer: dict[str, Any] = {}
                renderer = Renderer(**json.loads(line))
            else:
                text, spans = renderer.render(**json.loads(line))
                answer = {"text": text, "spans": spans}
        except Refusal as refusal:
            answer = {"refusal": str(refusal)}
        except Exception as error:
            answer = {"problem": _problem(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
