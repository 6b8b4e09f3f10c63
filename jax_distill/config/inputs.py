"""The schema's sections of what a run is made from: teacher, student, text, cache."""

from dataclasses import dataclass, field
from typing import Any, Literal


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
