"""`python -m jax_distill.doctor [--config X.yaml]`: does this machine compute what it should?

Prints devices, memory, versions and disk, then compares the attention and the loss that a run would
choose with their definitions, forward and backward, at a small size of the run's own dtypes, head
dims and masks. `train` does the comparison before anything else (`check`).

Letters: B rows, T positions, H query heads, G key/value heads, Q head dim.
"""

import functools
import importlib.metadata
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_distill import losses, student
from jax_distill.attention import Mask, attention, default_attention
from jax_distill.base.command import run_command
from jax_distill.base.console import say
from jax_distill.base.errors import RunError, UserError, one_line
from jax_distill.base.process import available_memory, machine_memory
from jax_distill.base.versions import versions
from jax_distill.batch import LiveTeacher
from jax_distill.config import Config, LossConfig, load
from jax_distill.devices import QUICK_COMPILE
from jax_distill.hf.locate import find_architecture
from jax_distill.model import ModelConfig
from jax_distill.model.experts import ExpertWeights, Gate, mix_experts
from jax_distill.objective import Execution
from jax_distill.synthetic import loss_inputs

LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}
"""Of |got − definition| / |definition|, Frobenius norms: a hundred roundings, or five of bf16."""
LONGEST = 1280
"""Positions compared at most: two blocks of `blockwise`, the second one not whole."""
HEADS = 8  # query heads compared at most, in whole groups


class Comparison(NamedTuple):
    """What was compared with its definition, and the largest relative error of its results.

    Attributes:
        name: of the implementation, `attention grouped`; definition: of what it must equal.
        sizes: in words. dtype: of the inputs. option: what to set where it is wrong.
        errors: by result: the output, and the gradient of each input; empty where the
            implementation is the definition.
    """

    name: str
    definition: str
    sizes: str
    dtype: str
    option: str
    errors: dict[str, float]

    @property
    def line(self) -> str:
        if not self.errors:
            return f"{self.name} is the definition itself, nothing to compare"
        what = max(self.errors, key=lambda key: self.errors[key])
        return (
            f"{self.name} against {self.definition}: {self.errors[what]:.1e} at most, in {what} "
            f"({self.sizes}, {self.dtype}; up to {LIMITS[self.dtype]:g} is right)"
        )

    def require(self) -> None:
        """Raises RunError where a result is further off than its dtype explains, or is NaN."""
        wrong = {k: v for k, v in self.errors.items() if not v <= LIMITS[self.dtype]}
        if wrong:
            found = ", ".join(f"{error:.1e} in {what}" for what, error in wrong.items())
            raise RunError(
                f"expected {self.name} within {LIMITS[self.dtype]:g} of {self.definition}, got "
                f"{found} ({self.sizes}, {self.dtype}): this machine computes it wrongly; set "
                f"{self.option}"
            )


def relative_errors(got: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    """Per name |got − exact| / |exact|, Frobenius norms in float64."""
    found = {}
    for name, right in exact.items():
        a, b = (np.asarray(jnp.asarray(x, jnp.float32), np.float64) for x in (got[name], right))
        found[name] = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30)
    return found


def errors_of(
    name: str, option: str, chosen: Callable[..., Any], definition: Callable[..., Any], inputs: Any
) -> dict[str, float]:
    """Both compiled and run, the definition on the same values in fp32; fp32 matmuls as such.

    Raises:
        RunError: the chosen one does not compile or run.
    """
    try:
        with jax.default_matmul_precision("highest"):
            # On a GPU it is compiled as the run compiles it: its kernels are in question there.
            on_cpu = jax.local_devices()[0].platform == "cpu"
            options = QUICK_COMPILE if on_cpu else None
            program = jax.jit(chosen).lower(*inputs).compile(compiler_options=options)
            got = jax.device_get(program(*inputs))
    except UserError:  # what was asked for is not to be had here
        raise
    except Exception as error:  # whatever a compiler or a driver has to say
        raise RunError(
            f"expected {name} to run on {jax.local_devices()[0].device_kind}, got "
            f"{type(error).__name__}: {one_line(error)[:300]}; set {option}"
        ) from error
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
        plain = jax.jit(definition).lower(*wide).compile(compiler_options=QUICK_COMPILE)
        return relative_errors(got, jax.device_get(plain(*wide)))


@functools.cache  # of a process: its other runs compute alike
def compare_attention(
    model: ModelConfig, kind: str, *, dtype: str, length: int, implementation: str
) -> Comparison:
    """One kind of layer: its window and sinks, two documents and padding in a row."""
    length = max(min(length, LONGEST) // 2 * 2, 2)
    ratio = model.num_attention_heads // model.num_key_value_heads
    groups = max(min(HEADS // ratio, model.num_key_value_heads), 1)
    width, window = model.head_dim, model.window(kind)
    words = f"1 row of {length:,}, {ratio * groups}/{groups} heads of {width}"
    words += f", window {window}" if window else ""
    option = "--train.attention " + ("reference" if implementation == "blockwise" else "blockwise")
    found = Comparison(f"attention {implementation}", "reference", words, dtype, option, {})
    if implementation == "reference":
        return found

    rng = np.random.default_rng(0)
    position = np.arange(length)
    ends = length // 3, length - length // 8
    segments = np.where(position < ends[0], 1, np.where(position < ends[1], 2, 0))[None]
    mask = Mask(jnp.asarray(segments, jnp.int32), window)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    heads, kv_heads = (1, length, ratio * groups, width), (1, length, groups, width)
    inputs = [normal(*heads), normal(*kv_heads), normal(*kv_heads), normal(*heads)]
    inputs += [normal(ratio * groups)] if model.attention_sinks else []

    def results(how: Any) -> Callable[..., dict[str, jax.Array]]:
        def run(query, key, value, cotangent, *sinks):
            def attend(query, key, value, *sinks):
                return attention(
                    query, key, value, mask, sinks=(*sinks, None)[0], implementation=how
                )

            output, pullback = jax.vjp(attend, query, key, value, *sinks)
            names = (f"the gradient of {x}" for x in ("query", "key", "value", "sinks"))
            return {"the output": output} | dict(zip(names, pullback(cotangent), strict=False))

        return run

    errors = errors_of(found.name, option, results(implementation), results("reference"), inputs)
    return found._replace(errors=errors)


@functools.cache
def compare_experts(model: ModelConfig, *, dtype: str, implementation: str) -> Comparison:
    """The experts' matmuls of 64 tokens against `blocks` in fp32; of sizes at most."""
    count, top_k = min(model.num_local_experts, 8), min(model.num_experts_per_tok, 4)
    width, inner = min(model.hidden_size, 320), min(model.intermediate_size, 320)
    words = f"64 tokens × {top_k} of {count} experts, {width} and {inner} wide"
    option = "--train.experts blocks"
    found = Comparison(f"experts {implementation}", "blocks in fp32", words, dtype, option, {})
    rng = np.random.default_rng(0)
    chosen = jnp.asarray(np.argsort(rng.random((64, count)))[:, :top_k], jnp.int32)
    gate = Gate(model.swiglu_alpha, model.swiglu_limit)

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    weights = ExpertWeights(
        normal(count, width, 2 * inner, scale=width**-0.5),
        normal(count, 2 * inner),
        normal(count, inner, width, scale=inner**-0.5),
        normal(count, width),
    )
    inputs = [normal(64, width), normal(64, top_k), weights, normal(64, width)]

    def results(how: Any) -> Callable[..., dict[str, jax.Array]]:
        def run(x, shares, weights, cotangent):
            def mix(x, shares, weights):
                return mix_experts(x, chosen, shares, weights, gate=gate, implementation=how)

            output, pullback = jax.vjp(mix, x, shares, weights)
            d_x, d_shares, d_weights = pullback(cotangent)
            named = {"the output": output, "the gradient of x": d_x}
            named["the gradient of the router's weights"] = d_shares
            return named | {f"the gradient of {k}": v for k, v in d_weights._asdict().items()}

        return run

    errors = errors_of(found.name, option, results(implementation), results("blocks"), inputs)
    return found._replace(errors=errors)


@functools.cache
def compare_loss(
    loss: LossConfig,
    *,
    dtype: str,
    vocab_size: int,
    width: int,
    top_k: int,
    live: tuple[int, str] | None = None,
) -> Comparison:
    """The loss as configured, in chunks, over rows with masked positions; sizes at most. live: the
    width and the dtype of a teacher whose whole distribution is the target."""
    vocab_size, width = min(vocab_size, 1024), min(width, 128)
    words = f"2 rows of 64, {width} wide, {vocab_size:,} ids"
    words += f", a live teacher {min(live[0], 128)} wide" if live else ""
    option = "--loss.implementation dense"
    found = Comparison(f"loss {loss.implementation}", "dense", words, dtype, option, {})
    if loss.implementation == "dense":
        return found

    made = loss_inputs(
        2,
        64,
        width=width,
        vocab_size=vocab_size,
        top_k=min(top_k, 32, vocab_size),
        temperature=loss.temperature,
        valid=0.9,
    )
    batch = made.batch.map(jnp.asarray)
    batch = batch if loss.kl_weight and not live else replace(batch, targets=None)
    teacher: list[jax.Array] = []
    if live and loss.kl_weight:
        theirs, of_teacher = np.random.default_rng(1), min(live[0], 128)
        shapes = ((2, 64, of_teacher), (vocab_size, of_teacher))
        drawn = (3 * theirs.normal(size=shape) / shape[-1] ** 0.25 for shape in shapes)
        teacher = [jnp.asarray(x, live[1]) for x in drawn]

    def results(execution: Execution) -> Callable[..., dict[str, jax.Array]]:
        def mean(hidden, weight, *teacher):
            targets = batch
            if teacher:
                states, head = teacher
                beside = LiveTeacher(states, losses.Head(head), loss.temperature)
                targets = replace(batch, teacher=beside)
            sums = losses.loss(hidden, losses.Head(weight), targets, loss.objective(), execution)
            return sums.loss / sums.count

        def run(*inputs):
            value, (d_hidden, d_weight) = jax.value_and_grad(mean, argnums=(0, 1))(*inputs)
            names = ("the loss", "the gradient of hidden", "the gradient of the head")
            return dict(zip(names, (value, d_hidden, d_weight), strict=True))

        return run

    chosen = replace(loss.execution(), chunk_size=32)
    inputs = [jnp.asarray(made.hidden, dtype), jnp.asarray(made.weight, dtype), *teacher]
    dense = results(Execution("dense"))
    return found._replace(errors=errors_of(found.name, option, results(chosen), dense, inputs))


def check(config: Config, models: Iterable[tuple[ModelConfig, str]]) -> None:
    """Compare, and say in one line each, what a run would choose for its models: the student's
    first. `models`: architecture and compute dtype.

    Raises:
        RunError: something is computed wrongly, or not at all; names the option that avoids it.
    """
    seen, length = set(), config.data.sequence_length
    (student_model, _), *others = models = list(models)
    for model, dtype in models:
        chosen = config.train.attention_implementation or default_attention(
            jnp.dtype(dtype), length, model.head_dim
        )
        for kind in model.kinds:
            found = compare_attention(
                model, kind, dtype=dtype, length=length, implementation=chosen
            )
            if found[:4] not in seen:
                seen.add(found[:4])
                found.require()
                say(f"first-minute check: {found.line}")
        if model.num_local_experts and config.train.experts == "hopper":
            found = compare_experts(model, dtype=dtype, implementation="hopper")
            found.require()
            say(f"first-minute check: {found.line}")
    live = None
    if config.teacher.mode == "online" and others:
        live = others[-1][0].hidden_size, others[-1][1]
    found = compare_loss(
        replace(config.loss, hidden_layers=None),  # no part of it, and a list has no hash
        dtype=config.train.compute_dtype,
        vocab_size=student_model.vocab_size,
        width=student_model.hidden_size,
        top_k=config.cache.top_k,
        live=live,
    )
    found.require()
    say(f"first-minute check: {found.line}")


def facts(folder: Path) -> list[str]:
    """Lines about the machine. `folder`: where a run would write."""
    devices, gb = jax.local_devices(), 1e9
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    while not folder.exists():
        folder = folder.parent
    cudnn = [
        f"{each.name} {each.version}"
        for each in importlib.metadata.distributions()
        if (each.name or "").startswith("nvidia-cudnn")
    ]
    return [
        f"devices: {len(devices)} × {devices[0].device_kind} ({devices[0].platform})",
        "device memory that this process gets: "
        + (f"{limit / gb:,.1f} GB each" if limit else "the host's"),
        f"host memory: {machine_memory() / gb:,.1f} GB, {available_memory() / gb:,.1f} available",
        f"disk of {folder}: {shutil.disk_usage(folder).free / gb:,.1f} GB free",
        "versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()),
        f"cuDNN: {', '.join(cudnn) or 'no wheel'}",
    ]


def main(argv: Sequence[str]) -> None:
    """Raises RunError where something is computed wrongly."""
    config = load(argv, "jax_distill.doctor") if argv else Config()
    for line in facts(Path(config.output_dir or ".").absolute()):
        say(line)
    if not argv:
        small = ModelConfig(
            vocab_size=1024,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
        )
        check(config, [(small, config.train.compute_dtype)])
        return
    models = [(student.planned_architecture(config).model, config.train.compute_dtype)]
    if config.teacher.path:
        models += [
            (find_architecture(config.teacher.path, "teacher.path")[0], config.teacher.dtype)
        ]
    check(config, models)


if __name__ == "__main__":
    run_command(main)
