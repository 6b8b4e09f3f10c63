"""A trained student as a Hugging Face folder that transformers and vLLM load.

`python -m jax_distill.export RUN OUT [--step N | --step best] [--push OWNER/NAME]` takes a
checkpoint of a run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jax_distill import hf
from jax_distill.base.command import CommandLine, run_command
from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.cache import read_manifest
from jax_distill.config import as_dict, load, read_mapping
from jax_distill.hf.push import check_repo, push_folder
from jax_distill.hidden_layers import PROJECTION
from jax_distill.model import Decoder, count_parameters
from jax_distill.model_folder import (
    EXPORT_MARKS,
    check_new_folder,
    copy_tokenizer,
    model_card,
    new_folder,
    text_files,
    write_config,
)
from jax_distill.run import STUDENT_FOLDER, read_metrics, read_summary
from jax_distill.training.checkpoint import Checkpoints
from jax_distill.training.projection import give_projection, without_projection


def check_folder(out: Path, student: Path, *apart: Path) -> None:
    """Refuse, before the work, an `out` that `write_folder` would not replace, or that is, holds or
    is in `student` or one of `apart`."""
    check_new_folder(out, marks=EXPORT_MARKS, apart=[student, *apart], names=text_files(student))


def write_folder(out: Path, model: Decoder, *, student: Path, dtype: str, card: str) -> None:
    """Write the folder whole or not at all; an older export at `out` is replaced.

    config.json is the student's own with the dtype changed, without a quantization, rope and dtype
    spelled for every reader; tokenizer, chat template, licence and generation config come along
    unchanged, the last made of config.json where it lacks. Both configs stop at the token that
    ended the text.
    Raises UserError and RunError as `new_folder` does.
    """
    with new_folder(out, marks=EXPORT_MARKS, apart=[student], names=text_files(student)) as partial:
        copy_tokenizer(student, partial)
        write_config(student, partial, dtype=dtype, quantization_config=None)
        hf.save_weights(partial, model, model.config, dtype=jnp.dtype(dtype))
        (partial / "README.md").write_text(card, "utf-8")


def card_at(run: Path, step: int, model: Decoder) -> str:
    """The card of the student as it was at `step`.

    The card of a finished run where that is the step; else one without the table, which is of the
    last step, but with the validation loss that was logged at this one, if there is one.
    """
    finished = run / "export" / "README.md"
    if read_summary(run).get("steps") == step and finished.is_file():
        return finished.read_text("utf-8", errors="replace")
    config = run_config(run)
    cache = config["cache"]["path"]
    if Path(cache) == Path(config["output_dir"]) / "cache":
        cache = run / "cache"  # the run may have been moved
    manifest = read_manifest(f"{cache}/train")
    logged: dict[str, Any] = next(
        (r for r in reversed(read_metrics(run / "metrics.jsonl")) if r["step"] == step), {}
    )
    facts = {
        "steps": step,
        "tokens_trained": step * config["train"]["batch_size"] * config["data"]["sequence_length"],
        "student_parameters": count_parameters(model.config),
        "validation": {
            key: value
            for key, value in logged.items()
            if key.startswith("val_") and value is not None
        },
    }
    return model_card(summary=facts, config=config, cache=manifest.fingerprint if manifest else "")


def run_config(run: Path) -> dict[str, Any]:
    """The configuration of a run folder, as `config.yaml` has it.

    Raises:
        UserError: no run folder, or a config.yaml that is not a configuration.
    """
    path, student = run / "config.yaml", run / STUDENT_FOLDER
    if not path.is_file() or not (student / "config.json").is_file():
        raise UserError(
            f"expected a run folder with config.yaml and {STUDENT_FOLDER}/, got {run}; "
            "check the path"
        )
    try:
        sections = read_mapping(path, "the configuration of the run")
        config = as_dict(load(["--config", str(path)]))
    except UserError as refusal:
        raise UserError(
            f"expected a whole configuration in {path}, got this: {refusal}; restore it"
        ) from None
    if not {"train", "data", "cache", "teacher", "loss", "seed", "output_dir"} <= sections.keys():
        raise UserError(
            f"expected a whole configuration in {path}, got a part of one; restore it, or run the "
            "training command again"
        )
    return config


def restore_student(run: Path, step: str, *, unverified: bool = False) -> tuple[Decoder, int]:
    """The student of a run at a checkpoint: `latest`, `best` (by held-out loss) or a number.

    Raises:
        UserError: no such run or step; one without hashes, unless `unverified`.
        RunError: a damaged step.
    """
    config, student = run_config(run), run / STUDENT_FOLDER
    dtypes = {key: jnp.dtype(config["train"][key]) for key in ("param_dtype", "compute_dtype")}
    architecture = hf.model_config(hf.read_config(student))
    shapes = nnx.eval_shape(lambda: Decoder(architecture, rngs=nnx.Rngs(0), **dtypes))
    options = {"keep": config["train"]["keep"], "seed": config["seed"]}
    with Checkpoints(run / "checkpoints", read_only=True, **options) as saved:
        known = {"latest": saved.latest_step(), "best": saved.best_step()}
        chosen = known[step] if step in known else int(step) if step.isdecimal() else None
        if chosen is None or chosen not in saved.steps():
            raise UserError(
                f"expected --step among {saved.steps()}, latest or best, got {step} in {run}; "
                "name one of them"
            )
        if not saved.verify(chosen) and not unverified:
            raise UserError(
                f"expected a verified checkpoint of step {chosen} in {run}, got one without hashes "
                "(its run was killed during the save); name another --step, or give --unverified"
            )
        if shape := saved.shape_of(chosen, PROJECTION):
            give_projection(shapes, jax.ShapeDtypeStruct(shape, dtypes["param_dtype"]))
        graphdef, params = nnx.split(shapes, nnx.Param)
        sharding = SingleDeviceSharding(jax.devices()[0])
        params = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding), params
        )
        params = saved.restore(chosen, params=params)["params"]
    return without_projection(nnx.merge(graphdef, params)), chosen


def main(argv: Sequence[str]) -> None:
    """Command line: export a run's checkpoint."""
    parser = CommandLine("jax_distill.export")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("out", type=Path, help="HF folder to write")
    parser.add_argument("--step", default="latest", help="a step, latest or best")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=None)
    parser.add_argument(
        "--unverified", action="store_true", help="also a checkpoint whose hashes are missing"
    )
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="and upload it to the Hugging Face hub (extra hub)"
    )
    options = parser.parse_args(argv)
    if options.push is not None:
        check_repo(options.push)
    run_config(options.run)
    student = options.run / STUDENT_FOLDER
    check_folder(options.out, student, options.run)
    model, step = restore_student(options.run, options.step, unverified=options.unverified)
    dtype = options.dtype or str(jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype)
    card = card_at(options.run, step, model)
    write_folder(options.out, model, student=student, dtype=dtype, card=card)
    say(f"wrote {options.out}: step {step}, {dtype}")
    if options.push is not None:
        say(f"pushed: {push_folder(options.out, options.push)}")


if __name__ == "__main__":
    run_command(main)
