"""A chat template in a process of its own, see template_worker.py."""

import json
import signal
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_distill.base.errors import RunError, UserError
from jax_distill.data import template_worker
from jax_distill.data.template_worker import Span


@dataclass(frozen=True)
class Limits:
    """Of a template, which is a program of somebody else.

    Attributes:
        seconds: of processor time for one conversation.
        memory: bytes of address space for the process.
        characters: of one rendering.
    """

    seconds: float = 10.0
    memory: int = 2 << 30
    characters: int = 50_000_000


LIMITS = Limits()


class Template:
    """Renders conversations; the process starts with the first one and ends with `close`, with this
    object, or with this process at the latest.

    Args:
        source: the template.
        values: names it may use besides the messages (bos_token, eos_token, …).
        special_tokens: those of the tokenizer: one of them may end an assistant's turn.
    """

    def __init__(
        self,
        source: str,
        *,
        values: dict[str, str],
        special_tokens: list[str],
        limits: Limits = LIMITS,
    ) -> None:
        self.source = source
        self._limits = limits
        self._setup = {
            "source": source,
            "values": values,
            "special_tokens": sorted(filter(None, special_tokens), key=len, reverse=True),
            "characters": limits.characters,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None
    ) -> tuple[str, list[Span]]:
        """The conversation's text, and the (first, end) spans of its characters that the assistant
        said, see `template_worker.Renderer.render`. With the messages as text and JSON values.

        Raises:
            UserError: the template does not parse, rejects the conversation, fails, or takes more
                than the limits allow.
        """
        if self._process is None:
            self._start()
        answer = self._ask({"messages": messages, "tools": tools})
        if "refusal" in answer:
            raise UserError(answer["refusal"])
        if "problem" in answer:
            raise UserError(
                f"expected messages that the chat template takes, got {answer['problem']}"
            )
        return answer["text"], [(first, end) for first, end in answer["spans"]]

    def check(self) -> None:
        """Raise UserError now if the template does not parse."""
        if self._process is None:
            self._start()

    def close(self) -> None:
        """End the process; a later `render` starts another one."""
        if self._process is not None:
            self._end()
            self._process = None

    def _start(self) -> None:
        command = [sys.executable, "-P", str(Path(template_worker.__file__))]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        except OSError as error:
            raise RunError(
                f"expected to start a process for the chat template, got {error.strerror}; "
                "re-run the same command"
            ) from None
        self._end = weakref.finalize(self, _end, self._process)
        limits = {"seconds": self._limits.seconds, "memory": self._limits.memory}
        self._send(limits)
        answer = self._ask(self._setup)
        if answer:
            self.close()
            raise UserError(
                "expected a chat template that jinja2 reads, got "
                f"{answer.get('problem') or answer['refusal']}"
            )

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        data = memoryview(json.dumps(request).encode() + b"\n")
        try:
            while data:
                data = data[self._process.stdin.write(data) :]
        except BrokenPipeError:
            pass  # it has ended: the answer will be empty, which says why

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        self._send(request)
        pieces: list[bytes] = []
        while not pieces or not pieces[-1].endswith(b"\n"):
            piece = self._process.stdout.read(1 << 20)
            if not piece:
                break
            pieces.append(piece)
        else:
            return dict(json.loads(b"".join(pieces)))
        code = self._process.wait()
        self.close()
        if code == -signal.SIGPROF:
            raise UserError(
                "expected a chat template that renders a conversation within "
                f"{self._limits.seconds:g} s of processor time, this one did not; correct it"
            )
        raise UserError(
            "expected a chat template that can be rendered, its process ended with "
            f"{signal.Signals(-code).name if code < 0 else f'exit code {code}'}; correct it"
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
