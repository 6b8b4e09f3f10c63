"""Rows of chat data as they are found: into messages that a chat template can take.

    {"messages": [{"role": …, "content": …}, …], "tools": […]}
    {"conversations": [{"from": "human", "value": …}, …], "system": …}   (ShareGPT)

Whatever is changed on the way, or not read, is counted under the words that the `text:` line shows.
"""

import json
import re
from collections import Counter
from typing import Any, NamedTuple

from jax_distill.base.errors import UserError, shown
from jax_distill.base.json_object import BAD_JSON

KEYS = ("messages", "conversations")  # of a row that holds a conversation
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
    **{role: role for role in ("user", "assistant", "system", "developer", "tool")},
}
WEIGHTS = ("weight", "train", "loss_mask")  # keys of a message: 0 or false is no target
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a message


class Conversation(NamedTuple):
    """messages: with `role`, text as `content`, and what else the row's had but null. learned: one
    for each assistant message: whether it is a target. tools: or None."""

    messages: list[dict[str, Any]]
    learned: list[bool]
    tools: list[Any] | None


def messages_of(row: dict[str, Any]) -> tuple[list[Any], list[Any] | None, list[str]]:
    """(messages as role and content, tools, keys that are not read) of a row of chat data.

    Raises:
        UserError: no list of messages, unknown speakers, tools that are no list.
    """
    key = next(key for key in KEYS if key in row)
    messages, read = row[key], {key, "tools"}
    if not isinstance(messages, list):
        raise UserError(f"expected {key} to be a list, got {shown(messages)}; fix the line")
    if key == "conversations":
        system, first = row.get("system"), messages[0] if messages else None
        if isinstance(system, str) and isinstance(first, dict) and first.get("from") != "system":
            read.add("system")
            messages = [{"from": "system", "value": system}, *messages] if system else messages
    messages = [_from_sharegpt(message, i) for i, message in enumerate(messages)]
    return messages, _tools_of(row.get("tools")), [name for name in row if name not in read]


def _from_sharegpt(message: Any, index: int) -> Any:
    if not isinstance(message, dict) or "role" in message or "from" not in message:
        return message
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in _ROLES:
        raise UserError(
            f"expected message {index} from {', '.join(_ROLES)}, got {shown(speaker)}; "
            "convert it to role and content"
        )
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": _ROLES[speaker], "content": message.get("value"), **rest}


def _tools_of(tools: Any) -> list[Any] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except BAD_JSON:
            pass  # refused as the text that it is
    if not tools and not isinstance(tools, int | float):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(
            f"expected tools to be a list of JSON Schemas of functions, got {shown(tools)}; "
            "fix the line"
        )
    return tools


def conversation(
    messages: list[Any], tools: list[Any] | None, source: str, counts: Counter[str]
) -> Conversation:
    """Messages as the template `source` takes them; what that changed goes into `counts`.

    Raises:
        UserError: messages of another form, named by their index.
    """
    if not messages:
        raise UserError("expected a list of messages, got an empty one")
    cleaned, learned = [], []
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise UserError(
                f"expected message {index} to have a role and content, got {shown(message)}"
            )
        if role == "assistant":
            learned.append(_is_learned(message, index))
            counts["assistant messages of weight 0, no targets"] += not learned[-1]
        elif any(_weights(message, index)):
            counts[f"{role} messages with a weight, no targets all the same"] += 1
        rest = {k: v for k, v in message.items() if v is not None and k not in WEIGHTS}
        rest["content"] = _content(message, index, source, counts)
        cleaned.append(rest)
    _check_characters([cleaned, tools])
    _count_unread(cleaned, source, counts)
    return Conversation(cleaned, learned, tools)


def _is_learned(message: dict[str, Any], index: int) -> bool:
    return all(_weights(message, index))


def _weights(message: dict[str, Any], index: int) -> list[bool]:
    """Those that a message has, as true or false."""
    found = {key: message[key] for key in WEIGHTS if message.get(key) is not None}
    for key, value in found.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise UserError(
                f"expected {key} of message {index} to be 0, 1, true or false, got {shown(value)}; "
                "fix the line"
            )
    return [bool(value) for value in found.values()]


def _content(message: dict[str, Any], index: int, source: str, counts: Counter[str]) -> str | None:
    content = message.get("content")
    if isinstance(content, list):
        counts["contents in parts, joined"] += 1
        return "".join(_part(part, index) for part in content)
    if content is None and message["role"] == "assistant":
        counts["assistant messages without content"] += 1
        # Some templates look for tool calls where the content is none; the others would write it.
        return None if _ASKS_FOR_NONE.search(source) else ""
    if not isinstance(content, str):
        raise UserError(
            f"expected message {index} to have text as content, got {shown(content)}; fix the line"
        )
    return content


_ASKS_FOR_NONE = re.compile(r"content['\"]?\]?\s+is\s+(?:not\s+)?none", re.IGNORECASE)


def _part(part: Any, index: int) -> str:
    if isinstance(part, dict) and part.get("type") in (None, "text", "input_text", "output_text"):
        part = part.get("text")
    if not isinstance(part, str):
        raise UserError(
            f"expected message {index} to have parts of type text, got {shown(part)}; "
            "leave the line out"
        )
    return part


def _check_characters(values: Any) -> None:
    try:
        text = json.dumps(values, ensure_ascii=False, default=str)
    except RecursionError:
        raise UserError("expected messages, got brackets nested too deeply; fix the line") from None
    bad = re.search("[\ufdd0-\ufdd4]", text)
    if bad:
        raise UserError(f"expected text, got the Unicode noncharacter U+{ord(bad[0]):X}; remove it")
    if re.search("[\ud800-\udfff]", text):
        raise UserError("expected Unicode text, got half a surrogate pair; fix the line")


def _count_unread(messages: list[dict[str, Any]], source: str, counts: Counter[str]) -> None:
    """Keys of messages whose names the template does not even contain."""
    if re.search(r"\bmessages?\s*\|\s*tojson", source):
        return
    for message in messages:
        for key in message:
            if key not in ("role", "content") and not re.search(rf"\b{re.escape(key)}\b", source):
                counts[f"messages whose {key} is not read"] += 1


def count_left_out(given: Conversation, text: str, counts: Counter[str]) -> None:
    """What of a conversation does not stand in the text that the template made of it."""

    def is_there(said: str) -> bool:
        said = said.strip()
        return said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text

    for message in given.messages:
        content, role = message["content"] or "", message["role"]
        thoughts = [message[key] for key in THOUGHTS if isinstance(message.get(key), str)]
        if role == "assistant":
            thought, closed, answer = content.partition("</think>")
            if closed:
                thoughts.append(thought.strip().removeprefix("<think>"))
                content = answer
        for thought in thoughts:
            counts["thoughts that the template leaves out"] += not is_there(thought)
        name = {"system": "system prompts", "developer": "system prompts"}.get(
            role, f"{role} messages"
        )
        counts[f"{name} that the template leaves out or changes"] += not is_there(content)
        for call in _dicts(message.get("tool_calls")):
            counts["tool calls that the template leaves out"] += not _names(call, text)
    for tool in given.tools or []:
        counts["tools that the template leaves out"] += not _names(tool, text)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _names(tool: dict[str, Any], text: str) -> bool:
    """Whether the name of a tool, or of a call of one, stands in a text."""
    function = tool.get("function")
    name = (function if isinstance(function, dict) else tool).get("name")
    return not isinstance(name, str) or name in text
