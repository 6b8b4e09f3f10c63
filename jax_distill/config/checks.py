"""What the types leave open: defaults that follow from other fields, values no run can mean."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from jax_distill.config.refusal import Refusal
from jax_distill.config.schema import Config, OptimizerConfig, StudentConfig


def derived(config: Config, name: str) -> Config:
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
    _check_student(config.student)
    check_optimizer(config.optimizer)
    if config.optimizer.layerwise and micro != train.batch_size:
        raise Refusal(
            f"expected train.micro_batch_size = train.batch_size {train.batch_size} with "
            f"optimizer.layerwise (accumulation keeps every gradient), got {micro}; set them alike"
        )
    _check_ranges(config)
    return config


def _check_student(student: StudentConfig) -> None:
    cut = student.from_teacher
    if bool(student.path) == (cut is not None):
        raise Refusal(
            "expected one of student.path and student.from_teacher, got "
            f"{'both' if cut else 'none'}; set one, the other to null (the path to an empty text)"
        )
    if cut is not None and (cut.layers is None) == (cut.parameters is None):
        raise Refusal(
            "expected one of student.from_teacher.layers and .parameters, got "
            f"{'none' if cut.layers is None else 'both'}; set one, the other to null"
        )


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Refuse what an optimizer cannot do as asked."""
    if optimizer.name == "adafactor" and optimizer.state_dtype != "float32":
        raise Refusal(
            f"expected optimizer.state_dtype float32 with adafactor, got {optimizer.state_dtype}; "
            "leave it: its factored state is small already"
        )
    if optimizer.layerwise and optimizer.name == "adafactor":
        raise Refusal(
            "expected optimizer.name adamw or sgd with optimizer.layerwise, got adafactor, which "
            "measures an update over all layers; set another, or optimizer.layerwise false"
        )
    if optimizer.layerwise and optimizer.clip_norm is not None:
        raise Refusal(
            "expected optimizer.clip_norm null with optimizer.layerwise (the norm is known only "
            f"after the last layer), got {optimizer.clip_norm}; set it to null"
        )


def _check_ranges(config: Config) -> None:
    """Refuse numbers that no run can mean, null left out."""
    values = dict(_flat_values(config))
    for test, words, keys in _RANGES:
        for key in keys.split():
            value = values.get(key)
            for number in value if isinstance(value, list) else [value]:
                if number is not None and not (math.isfinite(number) and test(number)):
                    raise Refusal(f"expected {key} {words}, got {number}; correct it")
    loss, profile = config.loss, config.train.profile_steps
    if not loss.kl_weight and not loss.ce_weight:
        raise Refusal(
            "expected loss.kl_weight or loss.ce_weight above 0, got 0 for both; "
            "set one of them to 1"
        )
    if profile is not None and not (len(profile) == 2 and 0 <= profile[0] < profile[1]):
        raise Refusal(
            f"expected train.profile_steps as [first, last) with 0 <= first < last, got {profile}; "
            "correct it, for example [10, 13]"
        )


_RANGES: tuple[tuple[Callable[[float], bool], str, str], ...] = (
    (
        lambda x: x > 0,
        "above 0",
        """teacher.batch_size data.sequence_length data.max_rows data.max_heldout_rows cache.top_k
        cache.read_top_k cache.temperatures cache.shard_rows loss.temperature loss.chunk_size
        optimizer.learning_rate optimizer.clip_norm train.steps train.batch_size
        train.micro_batch_size train.log_every train.eval_every train.save_every train.keep
        train.ce_baseline_learning_rate""",
    ),
    (
        lambda x: x >= 0,
        "of at least 0",
        """loss.kl_weight loss.ce_weight loss.z_loss_weight optimizer.warmup_steps
        optimizer.final_learning_rate optimizer.weight_decay""",
    ),
    (lambda x: 0 <= x < 1, "in [0, 1)", "data.heldout_fraction optimizer.b1 optimizer.b2"),
    (lambda x: 0 < x < 1, "between 0 and 1", "loss.jsd_beta"),
    (lambda x: x > 0 or x == -1, "above 0, or -1 for what is there", "mesh.data mesh.fsdp"),
    (lambda x: 0 <= x < 2**32, "in [0, 2^32)", "seed"),
)


def _flat_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value):
            yield from _flat_values(value, f"{prefix}{each.name}.")
        else:
            yield prefix + each.name, value
