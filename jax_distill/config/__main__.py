"""`python -m jax_distill.config --json_schema`: for completion in editors."""

import json
from collections.abc import Sequence

from jax_distill.base.command import CommandLine, run_command
from jax_distill.config.describe import json_schema


def main(argv: Sequence[str]) -> None:
    """Command line: print the JSON Schema of a configuration file."""
    parser = CommandLine("jax_distill.config")
    parser.add_argument(
        "--json_schema", action="store_true", required=True, help="print it, for example to a file"
    )
    parser.parse_args(argv)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "jax_distill"}
    print(json.dumps(head | json_schema(), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    run_command(main)
