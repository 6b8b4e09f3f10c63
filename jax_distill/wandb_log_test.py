"""The real wandb, offline: what its file holds of a training that is resumed."""

import dataclasses
import struct
import sys
from collections.abc import Iterator

import pytest

from jax_distill import wandb_log
from jax_distill.base.errors import UserError
from jax_distill.config import Config
from jax_distill.run import Metrics, Run


def configured(folder) -> Config:
    config = Config(output_dir=str(folder))
    return dataclasses.replace(config, train=dataclasses.replace(config.train, wandb="distil"))


def test_without_the_package_a_run_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(sys.modules["importlib.util"], "find_spec", lambda name: None)
    with pytest.raises(UserError, match="expected the package wandb for train.wandb distil, got n"):
        Run(configured(tmp_path / "run"), backend="jax")
    assert not (tmp_path / "run").exists()


def records(file: bytes) -> Iterator[bytes]:
    """Of a .wandb file: after 7 bytes a log of LevelDB, blocks of 32 KiB of pieces, each with
    checksum, length and whether it is a whole record (1), its first (2), middle or last piece (4).
    """
    at, whole = 7, b""
    while at + 7 <= len(file):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack_from("<IHB", file, at)
        piece = file[at + 7 : at + 7 + length]
        whole = piece if kind in (1, 2) else whole + piece
        at += 7 + length
        if kind in (1, 4):
            yield whole


@pytest.mark.filterwarnings("ignore")  # of wandb and what it imports
def test_a_resumed_run_goes_on_in_its_own_wandb_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    config, folder = configured(tmp_path), tmp_path
    for first, steps in ((0, (1, 2)), (2, (3,))):
        log = wandb_log.open_wandb(config, folder)
        with Metrics(folder, resume_step=first, wandb=log) as metrics:
            for step in steps:
                metrics.log(step, {"loss": 0.5 * step, "gradient_norm": float("nan")})
    found, ids = {}, set()
    for file in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            ids |= {record.run.run_id} - {""}
            items = record.history.item
            values = {item.key or item.nested_key[0]: item.value_json for item in items}
            if "loss" in values:
                assert "gradient_norm" not in values
                found[int(values["_step"])] = float(values["loss"])
    assert found == {1: 0.5, 2: 1.0, 3: 1.5}
    assert ids == {(tmp_path / wandb_log.ID_FILE).read_text()}
    assert wandb_log.open_wandb(Config(), tmp_path) is None
