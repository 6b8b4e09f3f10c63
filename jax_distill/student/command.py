"""Command line of `make_student`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jax_distill import hf
from jax_distill.base.command import CommandLine, above_zero
from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.base.files import find_path
from jax_distill.cache import Cache
from jax_distill.config import FromTeacher
from jax_distill.model import count_parameters
from jax_distill.student.cutting import make_student
from jax_distill.student.measure import CALIBRATION_ROWS

WIDTHS = {
    "intermediate_size": "neurons of each MLP that stay",
    "num_key_value_heads": "key/value heads that stay, with the query heads that read them",
    "hidden_size": "hidden dimensions that stay",
}


def main(argv: Sequence[str]) -> None:
    """Cut a student from a teacher, as the options say."""
    parser = CommandLine("jax_distill.student")
    parser.add_argument("--teacher", required=True, help="HF folder, GGUF file or hub id")
    parser.add_argument("--out", required=True, help="the student's folder")
    parser.add_argument("--layers", help="the teacher's layers that stay, e.g. 0,5")
    parser.add_argument(
        "--parameters",
        type=above_zero,
        help="at most this many: fewer layers, or with --layers narrower MLPs",
    )
    for name, words in WIDTHS.items():
        parser.add_argument(f"--{name}", type=above_zero, help=words)
    parser.add_argument(
        "--importance",
        metavar="CACHE",
        help="what stays is what is most important for this cache's rows: widths, and, instead of "
        "the first and the last ones, the layers under --parameters",
    )
    parser.add_argument(
        "--importance_by",
        choices=("cosine", "kl"),
        help="of layers: how far they turn the hidden states (default), or the rise of the KL "
        "without one",
    )
    parser.add_argument(
        "--rows", type=above_zero, default=CALIBRATION_ROWS, help="of that cache, at most"
    )
    options = parser.parse_args(argv)
    cut = _cut(options)
    teacher = hf.local_folder(find_path(options.teacher), key="--teacher")
    cache = Cache.open(options.importance) if options.importance else None
    out = make_student(teacher, Path(options.out), cut, cache=cache)
    config = hf.model_config(hf.read_config(out))
    say(f"{out} has {count_parameters(config):,} parameters")


def _cut(options: argparse.Namespace) -> FromTeacher:
    layers, parameters = None, options.parameters
    if options.layers is not None:
        try:
            layers = [int(x) for x in options.layers.split(",")]
        except ValueError:
            raise UserError(
                f"expected --layers as numbers like 0,5, got {options.layers}; write them so"
            ) from None
    by = options.importance_by
    if options.importance and parameters and layers is None:
        by = by or "cosine"
    cut = FromTeacher(
        layers=layers,
        parameters=parameters,
        importance_by=by,
        calibration_rows=options.rows,
        **{name: getattr(options, name) for name in WIDTHS},
    )
    if not (layers or parameters or cut.widths):
        raise UserError(
            "expected --layers, --parameters or a width (--" + ", --".join(WIDTHS) + "), got none; "
            "give one"
        )
    if options.importance and not cut.reads_rows:
        raise UserError(
            "expected --parameters or a width with --importance, got --layers; leave out "
            "--importance"
        )
    if cut.reads_rows and not options.importance:
        raise UserError(
            "expected --importance CACHE, whose rows show which parts are important, got none; "
            "name a cache, for example runs/cache/train"
        )
    return cut
