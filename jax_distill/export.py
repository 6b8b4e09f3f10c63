"""A trained student as a Hugging Face folder that transformers and vLLM load.

`python -m jax_distill.export RUN OUT [--step N | --step best]` takes a checkpoint of a run.
"""

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jax_distill import hf
from jax_distill.checkpoint import Checkpoints
from jax_distill.config import Refusal, run_command
from jax_distill.model import Decoder
from jax_distill.run import say
from jax_distill.student import copy_tokenizer

STUDENT_FOLDER = "student"  # in the run folder: what training began with


def write_folder(out: Path, model: Decoder, *, student: Path, dtype: str, card: str) -> None:
    """Write the folder whole or not at all; an older `out` is replaced.

    config.json is the student's own with only the dtype changed; tokenizer, chat template and
    generation config come along unchanged.
    """
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    copy_tokenizer(student, partial)
    raw = hf.read_config(student)
    for key in ("dtype", "torch_dtype"):
        raw[key] = dtype
    (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n", "utf-8")
    hf.save_weights(partial, model, model.config, dtype=jnp.dtype(dtype))
    (partial / "README.md").write_text(card, "utf-8")
    shutil.rmtree(out, ignore_errors=True)
    os.replace(partial, out)


def model_card(*, summary: Mapping[str, Any], config: Mapping[str, Any], store: str) -> str:
    """Where this student comes from and what it was measured to do, as the hub shows it."""
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"tags: [{'distillation, ' if config['teacher']['path'] else ''}jax-distill]",
        "---",
        "",
        "# A distilled student" if config["teacher"]["path"] else "# A language model",
        "",
        f"Trained with jax_distill on {summary['tokens_trained']:,} tokens "
        f"({summary['steps']:,} steps).",
        "",
        "| | |",
        "|---|---|",
        f"| teacher | `{config['teacher']['path'] or 'none'}` |",
        f"| parameters | {summary['student_parameters']:,} |",
        f"| store fingerprint | `{store}` |",
        f"| data | `{config['data']['path']}` |",
        f"| loss | {config['loss']['divergence']}, tail {config['loss']['tail']}, "
        f"temperature {config['loss']['temperature']}, ce_weight {config['loss']['ce_weight']} |",
    ]
    if summary.get("heldout"):
        lines += [
            "",
            "Held-out text, per token (KL to the teacher over the whole vocabulary, nats):",
            "",
            "| model | KL | cross-entropy | perplexity | top-1 agreement |",
            "|---|---|---|---|---|",
        ]
        for name, row in summary["heldout"].items():
            lines.append(
                f"| {name.replace('_', ' ')} | {row['kl']:.4f} | {row['cross_entropy']:.4f} "
                f"| {row['perplexity']:.2f} | {row['top1_agreement']:.3f} |"
            )
    lines += ["", "```yaml", yaml.safe_dump(dict(config), sort_keys=False).rstrip(), "```", ""]
    return "\n".join(lines)


def restore_student(run: Path, step: str) -> tuple[Decoder, int]:
    """The student of a run at a checkpoint: `latest`, `best` (by held-out loss) or a number.

    Raises:
        Refusal: no such run or step.
    """
    config_path, student = run / "config.yaml", run / STUDENT_FOLDER
    if not config_path.exists() or not (student / "config.json").exists():
        raise Refusal(f"expected a run folder with config.yaml and {STUDENT_FOLDER}/, got {run}")
    config = yaml.safe_load(config_path.read_text("utf-8"))
    dtypes = {key: jnp.dtype(config["train"][key]) for key in ("param_dtype", "compute_dtype")}
    architecture = hf.model_config(hf.read_config(student))
    shapes = nnx.eval_shape(lambda: Decoder(architecture, rngs=nnx.Rngs(0), **dtypes))
    graphdef, params = nnx.split(shapes, nnx.Param)
    place = SingleDeviceSharding(jax.devices()[0])
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=place), params)
    knobs = {"keep": config["train"]["keep"], "seed": config["seed"]}
    with Checkpoints(run / "checkpoints", **knobs) as saved:
        known = {"latest": saved.latest_step(), "best": saved.best_step()}
        chosen = known[step] if step in known else int(step) if step.isdecimal() else None
        if chosen is None or chosen not in saved.steps():
            raise Refusal(
                f"expected --step among {saved.steps()}, latest or best, got {step} in {run}"
            )
        params = saved.restore(chosen, params=params)["params"]
    return nnx.merge(graphdef, params), chosen


def main(argv: Sequence[str]) -> None:
    """Command line: export a run's checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m jax_distill.export", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("out", type=Path, help="HF folder to write")
    parser.add_argument("--step", default="latest", help="a step, latest or best")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=None)
    options = parser.parse_args(argv)
    model, step = restore_student(options.run, options.step)
    student = options.run / STUDENT_FOLDER
    finished = options.run / "export" / "README.md"
    card = f"# A distilled student\n\nStep {step} of an unfinished run of jax_distill.\n"
    if finished.exists():
        card = finished.read_text("utf-8")
    dtype = options.dtype or str(jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype)
    write_folder(options.out, model, student=student, dtype=dtype, card=card)
    say(f"wrote {options.out}: step {step}, {dtype}")


if __name__ == "__main__":
    run_command(main)
