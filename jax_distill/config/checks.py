"""What the types leave open: defaults that follow from other fields, values no run can mean."""

import dataclasses
import math
import re
from collections.abc import Callable

from jax_distill.base.errors import UserError
from jax_distill.config.inputs import FromTeacher, StudentConfig
from jax_distill.config.schema import Config, LossConfig, MeshConfig, OptimizerConfig, as_dict
from jax_distill.config.typed import flatten


def derived(config: Config, name: str) -> Config:
    """Fill the defaults that depend on other fields, and refuse what cannot be meant."""
    output_dir = config.output_dir or f"runs/{name}"
    if "://" in output_dir:
        raise UserError(
            f"expected output_dir as a folder of this machine, got {output_dir}: checkpoints, "
            "metrics and the lock of a run are files; copy the folder of a finished run there, and "
            "set cache.path alone to an object store"
        )
    cache = dataclasses.replace(config.cache, path=config.cache.path or f"{output_dir}/cache")
    config = dataclasses.replace(config, output_dir=output_dir, cache=cache)
    _check_ranges(config)  # first: what follows divides by some of them
    train, loss = config.train, config.loss
    micro = train.rows_per_micro_batch
    if train.batch_size % micro:
        raise UserError(
            f"expected train.micro_batch_size to divide train.batch_size {train.batch_size}, "
            f"got {micro}"
        )
    if train.steps and train.epochs:
        raise UserError(
            f"expected one of train.steps and train.epochs, got {train.steps} and {train.epochs}; "
            "set one, the other to null"
        )
    if not config.teacher.path and loss.kl_weight:
        raise UserError(
            f"expected teacher.path, got none with loss.kl_weight {loss.kl_weight}; "
            "name a teacher, or set loss.kl_weight 0 and loss.ce_weight 1"
        )
    if config.teacher.is_live:
        _check_online(config)
    elif loss.reads_teacher and loss.temperature not in config.cache.temperatures:
        raise UserError(
            f"expected loss.temperature among cache.temperatures {config.cache.temperatures}, "
            f"got {loss.temperature}; add it to cache.temperatures"
        )
    if loss.hidden_weight:
        _check_hidden(config)
    # Under hopper packed experts run in blocks.
    if config.teacher.packed_experts and train.experts == "ragged":
        raise UserError(
            f"expected train.experts blocks with teacher.packed_experts, got {train.experts}: its "
            "kernels read no packed weights; set one of the two otherwise"
        )
    if train.experts == "hopper" and config.mesh.expert != 1:
        raise UserError(
            f"expected mesh.expert 1 with train.experts hopper, got {config.mesh.expert}: its "
            "kernels want every expert's weights; use train.experts blocks"
        )
    _check_cache(config)
    _check_student(config.student)
    _check_optimizer(config.optimizer)
    if config.optimizer.layerwise and micro != train.batch_size:
        raise UserError(
            f"expected train.micro_batch_size = train.batch_size {train.batch_size} with "
            f"optimizer.layerwise (accumulation keeps every gradient), got {micro}; set them alike"
        )
    _check_processes(config.mesh)
    return config


def _check_online(config: Config) -> None:
    """Refuse what a teacher beside the student makes meaningless."""
    mode, cache = config.teacher.mode, config.cache
    if cache.read_top_k is not None:
        cure = "set cache.top_k" if mode == "online_top_k" else "its loss is over all; leave it out"
        raise UserError(
            f"expected cache.read_top_k null with teacher.mode {mode}, got {cache.read_top_k}: "
            f"no top K is stored; {cure}"
        )
    if cache.hidden_layers:
        raise UserError(
            f"expected cache.hidden_layers 0 with teacher.mode {mode}, got {cache.hidden_layers}: "
            "the teacher is there to be asked; leave it out"
        )
    if not config.loss.reads_teacher:
        raise UserError(
            f"expected loss.kl_weight or loss.hidden_weight above 0 with teacher.mode {mode}, got "
            "0 for both: the teacher would run for nothing; set teacher.path '' to learn from the "
            "text alone"
        )


def _check_hidden(config: Config) -> None:
    """Refuse a hidden-state loss without hidden states."""
    if not config.teacher.path:
        raise UserError(
            f"expected teacher.path with loss.hidden_weight {config.loss.hidden_weight}, got none; "
            "name a teacher, or set loss.hidden_weight 0"
        )
    if not config.teacher.is_live and not config.cache.hidden_layers:
        raise UserError(
            f"expected cache.hidden_layers with loss.hidden_weight {config.loss.hidden_weight} in "
            "teacher.mode offline, got none; set it, for example to 4, or teacher.mode online"
        )


def _check_cache(config: Config) -> None:
    """Refuse what a live teacher, or a random sample, cannot do together with other options."""
    cache, loss = config.cache, config.loss
    if config.teacher.is_live and (cache.is_random or cache.top_p is not None):
        expected, got = (
            ("cache.sampling top_k", cache.sampling)
            if cache.is_random
            else ("cache.top_p null", cache.top_p)
        )
        raise UserError(
            f"expected {expected} with teacher.mode {config.teacher.mode}, whose cache has rows "
            f"alone, got {got}; leave it out, or use teacher.mode offline"
        )
    if not cache.is_random:
        return
    default = LossConfig()
    for key, value, needed in (
        ("cache.read_top_k", cache.read_top_k, None),
        ("cache.top_p", cache.top_p, None),
        ("cache.temperatures", cache.temperatures, cache.temperatures[:1]),
        ("loss.divergence", loss.divergence, "forward_kl"),
        ("loss.tail", loss.tail, default.tail),
    ):
        if value != needed:
            raise UserError(
                f"expected {key} {'null' if needed is None else needed} with cache.sampling "
                f"random (draws at one temperature, an estimate of the forward KL), got {value}; "
                "set it so, or cache.sampling top_k"
            )


def _check_student(student: StudentConfig) -> None:
    cut = student.from_teacher
    if bool(student.path) == (cut is not None):
        raise UserError(
            "expected one of student.path and student.from_teacher, got "
            f"{'both' if cut else 'none'}; set one, the other to null (the path to an empty text)"
        )
    if cut is not None:
        check_cut(cut)


def check_cut(cut: FromTeacher) -> None:
    """Refuse a cut that says nothing, or one thing twice."""
    layers, parameters = cut.layers is not None, cut.parameters is not None
    if not (layers or parameters or cut.widths):
        raise UserError(
            "expected student.from_teacher.layers, .parameters or a width (intermediate_size, "
            "num_key_value_heads, hidden_size), got none; set one"
        )
    if layers and parameters and cut.intermediate_size is not None:
        raise UserError(
            "expected two of student.from_teacher.layers, .parameters and .intermediate_size, got "
            "all: nothing is left for parameters to decide; set one to null"
        )
    if cut.importance_by and (layers or not parameters):
        raise UserError(
            "expected student.from_teacher.parameters without layers for importance_by "
            f"{cut.importance_by}, which chooses the layers; set importance_by to null"
        )


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    """Refuse what an optimizer cannot do as asked."""
    if optimizer.name == "adafactor" and optimizer.state_dtype != "float32":
        raise UserError(
            f"expected optimizer.state_dtype float32 with adafactor, got {optimizer.state_dtype}; "
            "leave it: its factored state is small already"
        )
    for key, off in (("offload", "none"), ("layerwise", False)):
        if getattr(optimizer, key) != off and optimizer.name == "adafactor":
            raise UserError(
                f"expected optimizer.name adamw or sgd with optimizer.{key}, got adafactor, which "
                f"measures an update over all layers; set another, or optimizer.{key} "
                f"{str(off).lower()}"
            )
    if optimizer.layerwise and optimizer.clip_norm is not None:
        raise UserError(
            "expected optimizer.clip_norm null with optimizer.layerwise (the norm is known only "
            f"after the last layer), got {optimizer.clip_norm}; set it to null"
        )


def _check_processes(mesh: MeshConfig) -> None:
    """Refuse what names no group of processes, or no process of it."""
    address, count, number = mesh.coordinator_address, mesh.num_processes, mesh.process_id
    if not address and (count is not None or number is not None):
        raise UserError(
            f"expected mesh.coordinator_address with mesh.num_processes {count} and "
            f"mesh.process_id {number}, got none; set it to the first process's host:port, or auto"
        )
    if address not in ("", "auto") and not re.fullmatch(r"\S+:\d{1,5}", address):
        raise UserError(
            f"expected mesh.coordinator_address as host:port or auto, got {address[:60]!r}; "
            "correct it, for example to 10.0.0.1:8476"
        )
    if count is not None and number is not None and number >= count:
        raise UserError(
            f"expected mesh.process_id from 0 to {count - 1}, below mesh.num_processes, got "
            f"{number}; correct one of them"
        )


def _check_ranges(config: Config) -> None:
    """Refuse numbers that no run can mean, null left out."""
    values = flatten(as_dict(config))
    for test, words, keys in _RANGES:
        for key in keys.split():
            value = values.get(key)
            for number in value if isinstance(value, list) else [value]:
                if number is not None and not (math.isfinite(number) and test(number)):
                    raise UserError(f"expected {key} {words}, got {number}; correct it")
    loss, profile = config.loss, config.train.profile_steps
    if not (loss.reads_teacher or loss.ce_weight):
        raise UserError(
            "expected loss.kl_weight, loss.ce_weight or loss.hidden_weight above 0, got 0 for all; "
            "set one of them to 1"
        )
    if profile is not None and not (len(profile) == 2 and 0 <= profile[0] < profile[1]):
        raise UserError(
            f"expected train.profile_steps as [first, last) with 0 <= first < last, got {profile}; "
            "correct it, for example [10, 13]"
        )


_RANGES: tuple[tuple[Callable[[float], bool], str, str], ...] = (
    (
        lambda x: x > 0,
        "above 0",
        """teacher.batch_size data.max_rows data.max_heldout_rows cache.top_k cache.read_top_k
        cache.samples cache.temperatures cache.shard_rows loss.temperature loss.chunk_size
        loss.gradient_chunks
        optimizer.learning_rate optimizer.clip_norm train.steps train.epochs train.batch_size
        train.micro_batch_size train.resume_step train.log_every train.eval_every
        train.save_every train.keep train.ce_baseline_learning_rate evaluate.sample_tokens
        mesh.num_processes mesh.heartbeat_seconds mesh.join_seconds
        student.from_teacher.parameters
        student.from_teacher.intermediate_size student.from_teacher.num_key_value_heads
        student.from_teacher.hidden_size student.from_teacher.calibration_rows""",
    ),
    (
        lambda x: x >= 0,
        "of at least 0",
        """loss.kl_weight loss.ce_weight loss.z_loss_weight loss.router_weight
        loss.hidden_weight cache.hidden_layers
        optimizer.warmup_steps optimizer.final_learning_rate optimizer.weight_decay
        evaluate.samples mesh.process_id""",
    ),
    (lambda x: x >= 2, "of at least 2", "data.sequence_length"),
    (lambda x: 0 <= x < 1, "in [0, 1)", "data.heldout_fraction optimizer.b1 optimizer.b2"),
    (lambda x: 0 < x < 1, "between 0 and 1", "loss.jsd_beta cache.top_p"),
    (
        lambda x: x > 0 or x == -1,
        "above 0, or -1 for what is there",
        "mesh.data mesh.fsdp mesh.expert mesh.tensor",
    ),
    (lambda x: 0 <= x < 2**32, "in [0, 2^32)", "seed"),
)
