"""`jax-distill COMMAND …`, which is `python -m jax_distill.COMMAND …`, and what there is to begin
with: `jax-distill init`, `jax-distill completion bash`. Nothing heavy is imported for these."""

import difflib
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from jax_distill.base.command import CommandLine, run_command
from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.base.files import find_path
from jax_distill.base.versions import own_version
from jax_distill.config import field_names

COMMANDS = MappingProxyType(
    {
        "train": "from a teacher to a distilled student",
        "teacher": "write the cache: the teacher runs once",
        "import_logprobs": "write the cache from logprobs made elsewhere",
        "grow": "more text for a finished cache",
        "data": "the first rows of its text, as the models see them",
        "student": "cut a student from a teacher",
        "evaluate": "students against the teacher on held-out text",
        "tasks": "tasks of lm-evaluation-harness on models as they are",
        "export": "a checkpoint as a Hugging Face folder",
        "audit": "what a cache holds, and whether it is whole",
        "doctor": "does this machine compute what it should?",
        "report": "one run, or several beside each other, as HTML",
        "plan": "will it fit? the memory of a step, compiled for a GPU that is not there",
        "bench": "measure steps, losses and caches on this machine",
        "config": "the JSON Schema of a configuration, for editors",
    }
)
OWN = MappingProxyType(
    {
        "init": "copy a configuration to begin with",
        "completion": "print what makes bash complete commands and options",
    }
)
WITH_OPTIONS = (
    "train",
    "teacher",
    "import_logprobs",
    "grow",
    "data",
    "plan",
)  # that take the keys of a configuration
CASES = MappingProxyType(
    {
        "quickstart": "a small teacher on text that every Python has, minutes on a CPU",
        "own_chats": "a Hugging Face teacher and conversations in JSONL",
        "smollm2": "SmolLM2-135M out of a package, half an hour on a CPU",
        "llama31_8b_to_3b_8k": "Llama 3.1 8B to a 3B student, one GPU, rows of 8K",
    }
)

COMPLETION = """\
_jax_distill() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    elif [[ $word == -* && " {with_options} " == *" ${{COMP_WORDS[1]}} "* ]]; then
        COMPREPLY=($(compgen -W "{options}" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _jax_distill jax-distill
"""


def usage() -> str:
    """What `--help` prints."""
    lines = ["usage: jax-distill COMMAND …   (COMMAND --help says more; --version)", ""]
    lines += [f"  {name:<17}{words}" for name, words in {**COMMANDS, **OWN}.items()]
    return "\n".join(lines)


def init(argv: Sequence[str]) -> None:
    """`jax-distill init DIR [--case NAME]`: a commented configuration to edit."""
    cases = "; ".join(f"{name}: {words}" for name, words in CASES.items())
    parser = CommandLine("jax_distill init", description=cases)
    parser.add_argument("folder", help="where the YAML file goes")
    parser.add_argument("--case", choices=list(CASES), default="own_chats")
    options = parser.parse_args(argv)
    file = Path(options.folder) / f"{options.case}.yaml"
    if file.exists():
        raise UserError(f"expected no file at {file}, got one; name another folder")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(find_path(f"configs/{options.case}.yaml"), file)
    except OSError as error:
        raise UserError(
            f"expected to write {file}, got {error.strerror}; name another folder"
        ) from None
    say(f"wrote {file}; edit it, then: jax-distill train --config {file}")


def completion(argv: Sequence[str]) -> None:
    """`jax-distill completion bash`: a script for `eval` or for a file of bash-completion."""
    parser = CommandLine("jax_distill completion")
    parser.add_argument("shell", choices=["bash"])
    parser.parse_args(argv)
    words = {
        "commands": " ".join([*COMMANDS, *OWN]),
        "with_options": " ".join(WITH_OPTIONS),
        "options": " ".join(["--config", *(f"--{key}" for key in field_names())]),
    }
    print(COMPLETION.format(**words), end="")


def main(argv: Sequence[str]) -> None:
    """Hand the rest of the line to its command."""
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help"):
        print(usage())
    elif name == "--version":
        print(f"jax_distill {own_version()}")
    elif name in OWN:
        {"init": init, "completion": completion}[name](rest)
    elif name in COMMANDS:
        sys.argv = [f"jax-distill {name}", *rest]
        runpy.run_module(f"jax_distill.{name}", run_name="__main__", alter_sys=True)
    else:
        near = difflib.get_close_matches(name, [*COMMANDS, *OWN], 1)
        cure = f"the nearest is {near[0]}" if near else "--help shows all"
        raise UserError(f"expected a command, got {name!r}; {cure}")


def script() -> None:
    """The console script `jax-distill`."""
    run_command(main)


if __name__ == "__main__":
    script()
