"""The two ways in which a command ends that are not our own bugs, and values as messages show
them."""

import re
import reprlib
from typing import Any


class UserError(Exception):
    """Bad input, in one line: what was expected, what came, what to do. Exit code 2."""


class RunError(Exception):
    """The work cannot continue (loss not finite, cache damaged, disk full), in one line. Exit 1."""


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 60, 60, 60


def shown(value: Any) -> str:
    """`repr` of a value from outside, short and at any depth: for the "got" of a message."""
    return _SHORT.repr(value)


def one_line(message: object) -> str:
    """A message whose line breaks and other control characters, which came with a name or a value
    from outside, are escaped."""
    return re.sub(
        r"[\x00-\x1f\x7f-\x9f\u2028\u2029]",
        lambda match: match[0].encode("unicode_escape").decode(),
        str(message),
    )
