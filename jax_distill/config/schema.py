"""The schema: frozen dataclasses, each field with its words."""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml


@dataclass(frozen=True)
class TeacherConfig:
    """The model that is run once.

    Attributes:
        path: HF folder, GGUF file (`package:DIST:FILE` finds one inside an installed package) or
            hub id. Empty: no teacher, the student learns from the text alone.
        dtype: of its weights and products.
        batch_size: rows per teacher step.
    """

    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    batch_size: int = 8


@dataclass(frozen=True)
class FromTeacher:
    """How a student is cut from the teacher: by the layers kept, or by the size wanted.

    Attributes:
        layers: the teacher's layers that stay, in order (0-based).
        parameters: at most this many parameters; layers leave from the middle until it holds.
    """

    layers: list[int] | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class StudentConfig:
    """The model that is trained.

    Attributes:
        path: HF folder: config.json, and weights or a random start. Empty with `from_teacher`.
        from_teacher: make the student out of the teacher instead.
    """

    path: str = ""
    from_teacher: FromTeacher | None = None


@dataclass(frozen=True)
class Source:
    """One part of a mixture; `weight` is its share of the tokens, null uses it whole."""

    path: str
    weight: float | None = None


@dataclass(frozen=True)
class DataConfig:
    """The text.

    Attributes:
        path: file, folder, `builtin:english`, `builtin:pydoc_topics`, hub id, or a weighted list.
        format: `auto` goes by the suffix and the first line.
        tokenizer: folder with tokenizer.json (default: the teacher's, without one the student's);
            `bpe:2048` trains a byte-level BPE of that size on the text.
        sequence_length: T, tokens per row.
        packing: several documents a row (attention never crosses them), or one.
        heldout_fraction: share of the documents, chosen by a hash of their content.
        max_rows: rows of the training store at most.
        max_heldout_rows: rows of the held-out store at most.
    """

    path: str | list[Source] = "builtin:english"
    format: Literal["auto", "text", "jsonl", "chat", "tokens", "hub"] = "auto"
    tokenizer: str = ""
    sequence_length: int = 1024
    packing: bool = True
    heldout_fraction: float = 0.02
    max_rows: int | None = None
    max_heldout_rows: int | None = None


@dataclass(frozen=True)
class CacheConfig:
    """The top-K store, `<path>/train` and `<path>/heldout`.

    Attributes:
        path: a folder. Default: `<output_dir>/cache`.
        top_k: K, logits kept per position.
        read_top_k: train on the first k of the stored K (the rest joins the tail).
        temperatures: those whose normalisers are stored.
        shard_rows: rows per shard, the unit of commit.
    """

    path: str = ""
    top_k: int = 100
    read_top_k: int | None = None
    temperatures: list[float] = field(default_factory=lambda: [1.0])
    shard_rows: int = 64


@dataclass(frozen=True)
class LossConfig:
    """The loss of LOSS: kl_weight·τ²·KL + ce_weight·CE + z_loss_weight·lse², nats per valid token.

    Attributes:
        implementation: `dense`, `forward_chunked`, `fused_chunked` (the paper's) or `fused`.
        tail: what stands for the probability outside the K.
        divergence: over the K+1 outcomes.
        jsd_beta: weight of the teacher in the JSD's mixture.
        temperature: τ; must be among the store's.
        chunk_size: C, positions per chunk.
        kl_weight: 0 with `ce_weight` 1 is plain language-model training.
        ce_weight: of the cross-entropy against the data's own next token.
        z_loss_weight: of the squared log-normaliser.
        valid_first: skip chunks without a valid token, the valid positions of each row sorted to
            the front; pays where much is masked (chat data), and changes no number.
    """

    implementation: Literal["dense", "forward_chunked", "fused_chunked", "fused"] = "fused"
    tail: Literal["bucket", "renormalize", "truncate", "ignore"] = "bucket"
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    jsd_beta: float = 0.5
    temperature: float = 1.0
    chunk_size: int = 1024
    kl_weight: float = 1.0
    ce_weight: float = 0.0
    z_loss_weight: float = 0.0
    valid_first: bool = False


@dataclass(frozen=True)
class OptimizerConfig:
    """Optax by name; the schedule counts optimizer steps.

    Attributes:
        name: `adamw`, `sgd` (momentum b1) or `adafactor`.
        learning_rate: the highest.
        schedule: after the warm-up.
        warmup_steps: linear from 0.
        final_learning_rate: where `cosine` and `linear` end.
        weight_decay: decoupled, on matrices only.
        b1: first-moment decay.
        b2: second-moment decay.
        clip_norm: of the global gradient; null does not clip.
        state_dtype: of the moments; bfloat16 rounds the second one by chance, see optimizer.py.
        layerwise: update each layer inside the backward pass, so that the gradients are never all
            there; wants clip_norm null, one micro-batch a step, and not adafactor.
    """

    name: Literal["adamw", "sgd", "adafactor"] = "adamw"
    learning_rate: float = 1e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    final_learning_rate: float = 0.0
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    clip_norm: float | None = 1.0
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    layerwise: bool = False


@dataclass(frozen=True)
class TrainConfig:
    """The loop.

    Attributes:
        steps: optimizer steps; null is one pass over the store.
        batch_size: rows per optimizer step.
        micro_batch_size: rows per gradient pass (divides batch_size; null is all at once).
        param_dtype: of the parameters; bfloat16 rounds each update by chance, see rounding.py.
        compute_dtype: of the products.
        remat: what the backward recomputes: `none`, each `layer`, or all but the `dots`.
        log_every: steps between lines of metrics.jsonl.
        eval_every: steps between held-out losses; null only at the end.
        save_every: steps between checkpoints; null only at the end.
        keep: the last n checkpoints (the best by held-out loss is kept besides).
        ce_baseline: also train a student of the same size, start, rows and steps without teacher.
        ce_baseline_learning_rate: its own; null is the student's.
        profile_steps: write a jax.profiler trace of steps [first, last).
    """

    steps: int | None = None
    batch_size: int = 8
    micro_batch_size: int | None = None
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: Literal["none", "layer", "dots"] = "layer"
    log_every: int = 10
    eval_every: int | None = None
    save_every: int | None = None
    keep: int = 2
    ce_baseline: bool = False
    ce_baseline_learning_rate: float | None = None
    profile_steps: list[int] | None = None


@dataclass(frozen=True)
class MeshConfig:
    """Devices: `data` copies of the model, each sharded over `fsdp`. −1 takes what is there."""

    data: int = -1
    fsdp: int = 1


@dataclass(frozen=True)
class Config:
    """Everything; `output_dir` defaults to `runs/<the config file's name>`."""

    output_dir: str = ""
    seed: int = 0
    teacher: TeacherConfig = TeacherConfig()
    student: StudentConfig = StudentConfig()
    data: DataConfig = DataConfig()
    cache: CacheConfig = field(default_factory=CacheConfig)
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()


def field_names(cls: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, nested dataclasses included (`loss.temperature`)."""
    names = []
    for f in dataclasses.fields(cls):
        inner = dataclass_in(f.type)
        names.append(prefix + f.name)
        if inner is not None:
            names += field_names(inner, f"{prefix}{f.name}.")
    return names


def dataclass_in(annotation: Any) -> type | None:
    """The dataclass that a field holds, alone or beside None; None for plain values and lists."""
    options = getattr(annotation, "__args__", (annotation,))
    if getattr(annotation, "__origin__", None) is list:
        return None
    return next((t for t in options if dataclasses.is_dataclass(t)), None)  # type: ignore[return-value]


def without_teacher(config: Config) -> Config:
    """The same training without a teacher, at its own learning rate."""
    rate = config.train.ce_baseline_learning_rate or config.optimizer.learning_rate
    return dataclasses.replace(
        config,
        loss=dataclasses.replace(config.loss, kl_weight=0.0, ce_weight=1.0),
        optimizer=dataclasses.replace(config.optimizer, learning_rate=rate),
    )


def as_dict(config: Config) -> dict:
    """Plain nested dictionaries and lists, as YAML and JSON hold them."""
    return dataclasses.asdict(config)


def save(config: Config, path: Path) -> None:
    """Write the resolved configuration, whole or not at all; reading it back gives the same."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(yaml.safe_dump(as_dict(config), sort_keys=False), encoding="utf-8")
    os.replace(temporary, path)
