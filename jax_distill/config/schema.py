"""The schema: frozen dataclasses, each field with its words."""

import dataclasses
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from jax_distill.base.files import write_text
from jax_distill.config.yaml_text import dump
from jax_distill.objective import Execution, HiddenObjective, Objective


@dataclass(frozen=True)
class TeacherConfig:
    """The model that is run once, or beside the student.

    Attributes:
        mode: `offline`: once, its top K of every position go into the cache. `online`: in each
            step beside the student; the loss is over the whole vocabulary, the cache has rows
            alone, and teacher and student share the devices' memory. `online_top_k`: likewise, its
            `cache.top_k` largest logits being all that the loss reads of it, as a cache would hold
            them, at any temperature.
        path: HF folder, GGUF file (`package:DIST:FILE` finds one inside an installed package) or
            hub id. Empty: no teacher, the student learns from the text alone.
        dtype: of its weights and matmuls.
        batch_size: rows per teacher step.
        packed_experts: the JAX teacher's experts stay MXFP4 in device memory, as gpt-oss's files
            have them (a quarter of bf16), and each is decoded as it is used; the same numbers.
        beyond_context: of rows with positions beyond its max_position_embeddings: `refuse`, or
            `allow` them with a warning.
    """

    mode: Literal["offline", "online", "online_top_k"] = "offline"
    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    batch_size: int = 8
    packed_experts: bool = False
    beyond_context: Literal["refuse", "allow"] = "refuse"

    @property
    def is_live(self) -> bool:
        """Whether it runs beside the student."""
        return self.mode != "offline" and bool(self.path)


@dataclass(frozen=True)
class FromTeacher:
    """How a student is cut from the teacher: the layers kept, the widths, a number of parameters.

    What is named is done; `parameters` decides what is left: how many layers stay, or, where these
    are named, the width of the MLPs. Which neurons, heads and dimensions stay is measured over rows
    of the training cache.

    Attributes:
        layers: the teacher's layers that stay, in order (0-based).
        parameters: at most this many parameters; layers leave until it holds (from the middle, if
            there is no `importance_by`), or, with `layers`, neurons, the same number in each layer.
        intermediate_size: neurons of each MLP that stay.
        num_key_value_heads: key/value heads that stay, each with the query heads that read it.
        hidden_size: dimensions of the hidden states that stay.
        importance_by: the layers that stay under `parameters` are those of largest importance:
            `cosine`, how far they turn the hidden states; `kl`, how much the KL rises without one.
        calibration_rows: rows of the training cache over which importance is measured; null: 16.
    """

    layers: list[int] | None = None
    parameters: int | None = None
    intermediate_size: int | None = None
    num_key_value_heads: int | None = None
    hidden_size: int | None = None
    importance_by: Literal["cosine", "kl"] | None = None
    calibration_rows: int | None = None

    @property
    def widths(self) -> dict[str, int]:
        """The widths named, as config.json names them."""
        names = ("intermediate_size", "num_key_value_heads", "hidden_size")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def reads_rows(self) -> bool:
        """Whether importance is measured, over rows of a cache."""
        narrows_mlp = self.layers is not None and self.parameters is not None
        return bool(self.widths) or self.importance_by is not None or narrows_mlp


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
        packing: several documents a row, or one.
        separate_documents: attention does not cross the documents of a row; false is the all-ones
            mask that others train with.
        heldout_fraction: share of the documents, chosen by a hash of their content.
        max_rows: rows of the training cache at most.
        max_heldout_rows: rows of the held-out cache at most.
    """

    path: str | list[Source] = "builtin:english"
    format: Literal["auto", "text", "jsonl", "chat", "tokens", "hub"] = "auto"
    tokenizer: str = ""
    sequence_length: int = 1024
    packing: bool = True
    separate_documents: bool = True
    heldout_fraction: float = 0.02
    max_rows: int | None = None
    max_heldout_rows: int | None = None

    def row_settings(self) -> dict[str, Any]:
        """What a cache's manifest says, by name, of how its rows were made; an option newer than
        the format only where it is not its default."""
        names = ["format", "packing", "heldout_fraction"]
        names += [] if self.separate_documents else ["separate_documents"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class CacheConfig:
    """The top-K cache, `<path>/train` and `<path>/heldout`.

    Attributes:
        path: a folder, or one of an object store, `s3://BUCKET/FOLDER` (docs/CACHE.md). Default:
            `<output_dir>/cache`.
        top_k: K, logits kept per position.
        top_p: keep of the K as many as reach this probability at the first of `temperatures`; null
            keeps all.
        read_top_k: train on the first k of the stored K (the rest joins the tail).
        sampling: which ids are kept: the `top_k` most likely, or `random` ones, drawn from the
            teacher with replacement; the loss is then an unbiased estimate of the forward KL over
            the whole vocabulary.
        samples: draws of a position, with `sampling: random`, instead of top_k.
        temperatures: those whose normalizers are stored.
        hidden_layers: the teacher's layers whose outputs are stored too, in bf16 (0 is the first);
            a number is as many, spread evenly. For loss.hidden_weight.
        shard_rows: rows per shard, the unit of commit.
    """

    path: str = ""
    top_k: int = 100
    top_p: float | None = None
    read_top_k: int | None = None
    sampling: Literal["top_k", "random"] = "top_k"
    samples: int = 50
    temperatures: list[float] = field(default_factory=lambda: [1.0])
    hidden_layers: int | list[int] = 0
    shard_rows: int = 64

    @property
    def is_random(self) -> bool:
        """Whether the ids kept are drawn."""
        return self.sampling == "random"

    @property
    def stored_top_k(self) -> int:
        """K, the width of the cache's arrays."""
        return self.samples if self.is_random else self.top_k

    def stored_targets(self, length: int) -> dict[str, Any]:
        """The fields of a cache's manifest that say which targets are stored, of rows of `length`
        tokens."""
        return {
            "top_k": self.stored_top_k,
            "top_p": self.top_p,
            "sampling": self.sampling,
            "temperatures": tuple(self.temperatures),
            "optional": {"teacher_draws": [length, self.samples]} if self.is_random else {},
        }


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
