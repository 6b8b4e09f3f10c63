"""A trained student as a Hugging Face folder that transformers and vLLM load.

`python -m jax_distill.export RUN OUT [--step N | --step best]` takes a checkpoint of a run.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jax_distill import hf
from jax_distill.cache import read_manifest
from jax_distill.card import generation_config, model_card
from jax_distill.checkpoint import Checkpoints
from jax_distill.config import (
    EXPORT_MARKS,
    CommandLine,
    Refusal,
    check_new_folder,
    new_folder,
    run_command,
)
from jax_distill.model import Decoder
from jax_distill.run import read_metrics, say
from jax_distill.student import STUDENT_FOLDER, copy_tokenizer, count_parameters, text_files


def check_folder(out: Path, student: Path, *apart: Path) -> None:
    """Refuse, before the work, an `out` that `write_folder` would not replace, or that is, holds or
    lies in `student` or one of `apart`."""
    check_new_folder(out, marks=EXPORT_MARKS, apart=[student, *apart], names=text_files(student))


def write_folder(out: Path, model: Decoder, *, student: Path, dtype: str, card: str) -> None:
    """Write the folder whole or not at all; an older export at `out` is replaced.

    config.json is the student's own with only the dtype changed; tokenizer, chat template and
    generation config come along unchanged, the last made of config.json where it lacks.
    Raises Refusal and Failure as `new_folder` does.
    """
    with new_folder(out, marks=EXPORT_MARKS, apart=[student], names=text_files(student)) as partial:
        copy_tokenizer(student, partial)
        raw = hf.read_config(student)
        for key in ("dtype", "torch_dtype"):
            raw[key] = dtype
        (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n", "utf-8")
        if not (partial / "generation_config.json").exists():
            (partial / "generation_config.json").write_text(generation_config(raw), "utf-8")
        hf.save_weights(partial, model, model.config, dtype=jnp.dtype(dtype))
        (partial / "README.md").write_text(card, "utf-8")


def card_at(run: Path, step: int, model: Decoder) -> str:
    """The card of the student as it was at `step`.

    The card of a finished run where that is the step; else one without the table, which is of the
    last step, but with the validation loss that was logged at this one, if there is one.
    """
    summary, finished = _json_object(run / "summary.json"), run / "export" / "README.md"
    if summary.get("steps") == step and finished.is_file():
        return finished.read_text("utf-8")
    config = run_config(run)
    store = Path(config["cache"]["path"])
    if store == Path(config["output_dir"]) / "cache":
        store = run / "cache"  # the run may have been moved
    manifest = read_manifest(str(store / "train"))
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
            if key.startswith("heldout_") and value is not None
        },
    }
    return model_card(summary=facts, config=config, store=manifest.fingerprint if manifest else "")


def _json_object(path: Path) -> dict[str, Any]:
    """{} where nothing is."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise Refusal(
            f"expected a JSON object in {path}, got {error}; delete it, or let the run finish again"
        ) from None


def run_config(run: Path) -> dict[str, Any]:
    """The configuration of a run folder, as `config.yaml` has it.

    Raises:
        Refusal: no run folder, or a config.yaml that is not a configuration.
    """
    path, student = run / "config.yaml", run / STUDENT_FOLDER
    if not path.is_file() or not (student / "config.json").is_file():
        raise Refusal(
            f"expected a run folder with config.yaml and {STUDENT_FOLDER}/, got {run}; "
            "check the path"
        )
    try:
        config = yaml.safe_load(path.read_text("utf-8"))
    except (ValueError, yaml.YAMLError):
        config = None
    sections = {"train", "data", "cache", "teacher", "loss", "seed", "output_dir"}
    if not isinstance(config, dict) or not sections <= config.keys():
        raise Refusal(
            f"expected a whole configuration in {path}, got another text; restore it, or run the "
            "training command again"
        )
    return config


def restore_student(run: Path, step: str) -> tuple[Decoder, int]:
    """The student of a run at a checkpoint: `latest`, `best` (by held-out loss) or a number.

    Raises:
        Refusal: no such run or step.
    """
    config, student = run_config(run), run / STUDENT_FOLDER
    dtypes = {key: jnp.dtype(config["train"][key]) for key in ("param_dtype", "compute_dtype")}
    architecture = hf.model_config(hf.read_config(student))
    shapes = nnx.eval_shape(lambda: Decoder(architecture, rngs=nnx.Rngs(0), **dtypes))
    graphdef, params = nnx.split(shapes, nnx.Param)
    place = SingleDeviceSharding(jax.devices()[0])
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=place), params)
    knobs = {"keep": config["train"]["keep"], "seed": config["seed"]}
    with Checkpoints(run / "checkpoints", read_only=True, **knobs) as saved:
        known = {"latest": saved.latest_step(), "best": saved.best_step()}
        chosen = known[step] if step in known else int(step) if step.isdecimal() else None
        if chosen is None or chosen not in saved.steps():
            raise Refusal(
                f"expected --step among {saved.steps()}, latest or best, got {step} in {run}; "
                "name one of them"
            )
        params = saved.restore(chosen, params=params)["params"]
    return nnx.merge(graphdef, params), chosen


def main(argv: Sequence[str]) -> None:
    """Command line: export a run's checkpoint."""
    parser = CommandLine("jax_distill.export")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("out", type=Path, help="HF folder to write")
    parser.add_argument("--step", default="latest", help="a step, latest or best")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=None)
    options = parser.parse_args(argv)
    run_config(options.run)
    student = options.run / STUDENT_FOLDER
    check_folder(options.out, student, options.run)
    model, step = restore_student(options.run, options.step)
    dtype = options.dtype or str(jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype)
    card = card_at(options.run, step, model)
    write_folder(options.out, model, student=student, dtype=dtype, card=card)
    say(f"wrote {options.out}: step {step}, {dtype}")


if __name__ == "__main__":
    run_command(main)
