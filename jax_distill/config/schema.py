"""The schema: frozen dataclasses, each field with its words."""

import dataclasses
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from jax_distill.base.files import write_text
from jax_distill.config.inputs import CacheConfig, DataConfig, StudentConfig, TeacherConfig
from jax_distill.config.yaml_text import dump
from jax_distill.objective import Execution, HiddenObjective, Objective


@dataclass(frozen=True)
class LossConfig:
    """The loss: kl_weight·τ²·KL + ce_weight·CE + z_loss_weight·lse² + hidden_weight·hidden-state
    distance, per valid token.

    One flat section; `objective`, `hidden_objective` and `execution` are its parts, described in
    objective.py.

    Attributes:
        temperature: τ, of both sides of the divergence; must be among the cache's.
        router_weight: of the load-balancing term of a student with experts.
        hidden_weight: of the distance between layers' outputs of student and teacher; where their
            widths differ, learned projections come with it.
        hidden_kind: that distance: `cosine` 1 − cos, or `mse`.
        hidden_layers: pairs [student's layer, teacher's layer] (0 is the first), or how many pairs,
            spread evenly; null is four, or what the shallower model has.
    """

    implementation: Literal["dense", "forward_chunked", "fused_chunked", "fused"] = "fused"
    tail: Literal["bucket", "renormalize", "truncate", "ignore"] = "bucket"
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    jsd_beta: float = 0.5
    temperature: float = 1.0
    chunk_size: int = 1024
    gradient_chunks: int = 1
    kl_weight: float = 1.0
    ce_weight: float = 0.0
    z_loss_weight: float = 0.0
    router_weight: float = 0.0
    hidden_weight: float = 0.0
    hidden_kind: Literal["cosine", "mse"] = "cosine"
    hidden_layers: int | list[list[int]] | None = None
    valid_first: bool = False

    @property
    def reads_teacher(self) -> bool:
        """Whether any term compares with the teacher."""
        return bool(self.kl_weight or self.hidden_weight)

    def objective(self) -> Objective:
        """What is computed. The temperature comes with the cache's targets."""
        return Objective(**{each.name: getattr(self, each.name) for each in fields(Objective)})

    def hidden_objective(self) -> HiddenObjective | None:
        """The hidden-state term, once `hidden_layers` are pairs; None without hidden_weight."""
        if not self.hidden_weight:
            return None
        assert isinstance(self.hidden_layers, list), "hidden_layers.with_pairs comes before"
        pairs = tuple((ours, theirs) for ours, theirs in self.hidden_layers)
        return HiddenObjective(pairs, kind=self.hidden_kind, weight=self.hidden_weight)

    def execution(self, *, row_shards: int = 1) -> Execution:
        """How it is computed, for batches whose rows are split over `row_shards` devices."""
        return Execution(
            implementation=self.implementation,
            chunk_size=self.chunk_size,
            gradient_chunks=self.gradient_chunks,
            valid_first=self.valid_first,
            row_shards=row_shards,
        )


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
        state_dtype: of the moments; bfloat16 rounds the second one stochastically,
            see training/optimizer.py.
        layerwise: update each layer inside the backward pass, so that the gradients are never all
            there; wants clip_norm null, one micro-batch a step, and not adafactor.
        offload: `moments` keeps them in the host's memory and updates a layer at a time.
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
    offload: Literal["none", "moments"] = "none"


@dataclass(frozen=True)
class TrainConfig:
    """The loop.

    Attributes:
        steps: optimizer steps; null is as `epochs` says.
        epochs: passes over the cache, instead of steps; null is one. 0.5 is half of it.
        batch_size: rows per optimizer step.
        micro_batch_size: rows per gradient pass (divides batch_size; null is all at once).
        param_dtype: of the parameters; bfloat16 rounds each update stochastically, see
            training/rounding.py.
        compute_dtype: of the matmuls.
        attention: its implementation in every model that the run loads; `auto` chooses by device.
            `hopper` (extra of that name) wants a Hopper GPU, bf16 and a head dim of 64 or 128.
        experts: of models that have them: `blocks`, in JAX, or the kernels of the extra `hopper`;
            `ragged` is `blocks`, but that devices that share experts (mesh.expert) send each other
            the rows they want by a ragged all-to-all, on GPUs. Compiled for them, never run.
        remat: what the backward recomputes: `none`, each `layer`, or all but the `dots`.
        log_every: steps between lines of metrics.jsonl.
        eval_every: steps between held-out losses; null only at the end.
        save_every: steps between checkpoints; null only at the end.
        keep: the last n checkpoints (the best by validation loss is kept besides).
        resume_step: resume from this checkpoint, not the newest; later ones are set aside.
        ce_baseline: also train a student of the same size, start, rows and steps without teacher.
        ce_baseline_learning_rate: its own; null is the student's.
        profile_steps: write a jax.profiler trace of steps [first, last).
        wandb: project of Weights & Biases that gets the metrics as well (extra of that name).
    """

    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 8
    micro_batch_size: int | None = None
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    attention: Literal["auto", "grouped", "hopper", "blockwise", "reference"] = "auto"
    experts: Literal["blocks", "hopper", "ragged"] = "blocks"
    remat: Literal["none", "layer", "dots"] = "layer"
    log_every: int = 10
    eval_every: int | None = None
    save_every: int | None = None
    keep: int = 2
    resume_step: int | None = None
    ce_baseline: bool = False
    ce_baseline_learning_rate: float | None = None
    profile_steps: list[int] | None = None
    wandb: str = ""

    def total_steps(self, rows: int) -> int:
        """Optimizer steps over a cache of so many rows: whole batches, one at least."""
        return self.steps or max(math.floor((self.epochs or 1) * rows / self.batch_size), 1)

    @property
    def attention_implementation(
        self,
    ) -> Literal["grouped", "hopper", "blockwise", "reference"] | None:
        """None where it is chosen by device."""
        return None if self.attention == "auto" else self.attention

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows per gradient pass: micro_batch_size, or all of batch_size."""
        return self.micro_batch_size or self.batch_size


@dataclass(frozen=True)
class EvaluateConfig:
    """What a finished run shows beside its test table.

    Attributes:
        samples: beginnings of held-out documents that teacher and students continue, side by side
            in the log, summary.json and report.html; 0: none.
        sample_tokens: how many tokens each writes.
    """

    samples: int = 2
    sample_tokens: int = 32


@dataclass(frozen=True)
class MeshConfig:
    """Devices. −1 takes as many as there are.

    Attributes:
        data: copies of the model, each with rows of its own.
        fsdp: devices that share the parameters and moments of one copy, and split rows too.
        expert: devices that share a model's experts; they split rows, and are to all other
            parameters what fsdp's are.
        tensor: devices that share the heads, the MLP's width and the vocabulary of the same rows.
        coordinator_address: host:port on which the first of several processes listens, or `auto`:
            Slurm, Open MPI or Kubernetes say so (jax.distributed). Empty: one process.
        num_processes: how many; null is what the cluster says.
        process_id: which of them this is, from 0; null is what the cluster says.
        heartbeat_seconds: after so long without a sign of one process, all the others end.
        join_seconds: how long processes wait at the start for all of them to come.
    """

    data: int = -1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    coordinator_address: str = ""
    num_processes: int | None = None
    process_id: int | None = None
    heartbeat_seconds: int = 60
    join_seconds: int = 120

    @property
    def axes(self) -> dict[str, Any]:
        """The sizes by name, as `sharding.make_mesh` takes them."""
        return {name: getattr(self, name) for name in ("data", "fsdp", "expert", "tensor")}

    @property
    def processes(self) -> dict[str, Any]:
        """The rest by name, as `processes.started` takes it."""
        axes = self.axes
        return {name: value for name, value in vars(self).items() if name not in axes}


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
    evaluate: EvaluateConfig = EvaluateConfig()


def without_teacher(config: Config) -> Config:
    """The same training without a teacher, at its own learning rate."""
    rate = config.train.ce_baseline_learning_rate or config.optimizer.learning_rate
    return dataclasses.replace(
        config,
        loss=dataclasses.replace(config.loss, kl_weight=0.0, ce_weight=1.0, hidden_weight=0.0),
        optimizer=dataclasses.replace(config.optimizer, learning_rate=rate),
    )


def as_dict(config: Config) -> dict:
    """Plain nested dictionaries and lists, as YAML and JSON hold them."""
    return dataclasses.asdict(config)


def save(config: Config, path: Path) -> None:
    """Write the resolved configuration, whole or not at all; reading it back gives the same."""
    write_text(path, dump(as_dict(config)))
