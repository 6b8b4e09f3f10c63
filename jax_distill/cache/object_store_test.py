"""Caches on an object store: a server on this machine, one line each, a network that breaks."""

import contextlib
import hashlib
import json
import os
import pickle
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from jax_distill.base.errors import RunError, UserError
from jax_distill.cache import Cache, Location, create, integrity, location, object_store
from jax_distill.cache.conftest import (
    CREDENTIALS,
    bucket_bytes,
    free_port,
    local_bytes,
    put,
    request,
)
from jax_distill.cache.location import LOCK, Bucket
from jax_distill.cache_test import cache_of, small

# ---- what is read is what was written -----------------------------------------------------------


def test_a_cache_of_a_bucket_holds_what_one_of_a_folder_holds(tmp_path, bucket):
    """Byte for byte; both spellings of the path are one cache; nothing is left beside it."""
    local, arrays, _ = small(tmp_path, length=8, top_k=4)
    cache = cache_of(f"{bucket}//train/", local.manifest, arrays)
    cache.require_complete()
    assert bucket_bytes(f"{bucket}/train") == local_bytes(tmp_path)
    assert Location(f"{bucket}/train").identity == cache.location.identity
    assert cache.location.name == "train" and cache.location.free_bytes() is None
    assert cache.location.active_writer() is None and Location(bucket).read(LOCK) is None
    cache.location.check_writable()
    assert bucket_bytes(f"{bucket}/train") == local_bytes(tmp_path)
    rows = np.array([9, 0, 3, 3])
    for batch in (cache.read(rows), pickle.loads(pickle.dumps(cache)).read(rows)):
        np.testing.assert_array_equal(batch.targets.logprobs, local.read(rows).targets.logprobs)


READ = """
import sys, hashlib
from jax_distill.cache import Cache
cache = Cache.open(sys.argv[1])
cache.require_complete()
batch = cache.read(range(cache.rows)[::-1])
assert "jax" not in sys.modules
print(hashlib.sha256(batch.tokens.tobytes() + batch.targets.logprobs.tobytes()).hexdigest())
"""


def test_two_processes_read_the_same_at_once(tmp_path, bucket):
    local, arrays, _ = small(tmp_path, length=8, top_k=4)
    cache_of(bucket, local.manifest, arrays)
    command = [sys.executable, "-c", READ]
    both = [subprocess.Popen([*command, bucket], stdout=subprocess.PIPE) for _ in range(2)]
    batch = local.read(range(10)[::-1])
    expected = hashlib.sha256(batch.tokens.tobytes() + batch.targets.logprobs.tobytes())
    assert {p.communicate()[0].decode().strip() for p in both} == {expected.hexdigest()}


def test_what_was_found_right_is_not_fetched_again_until_it_changes(tmp_path, bucket, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(integrity, "REMEMBERED_BYTES", 0)
    fetched = []
    digest = Bucket.digest
    monkeypatch.setattr(
        Bucket, "digest", lambda self, key: fetched.append(key) or digest(self, key)
    )
    local, arrays, _ = small(tmp_path / "local", length=8, top_k=4)
    cache = cache_of(bucket, local.manifest, arrays)
    for expected in (10 * 3, 0):
        fetched.clear()
        cache.require_complete()
        assert len(fetched) == expected
    key = "teacher_gap_steps/c/1/0/0"
    put(bucket, key, bytes(len(cache.location.read(key))))
    with pytest.raises(RunError, match=f"{key} .rows 4 to 7.*sha256"):
        cache.require_complete()
    assert fetched == [key]
    (memory,) = (tmp_path / "user").rglob("*.json")
    noted = json.loads(memory.read_text())
    for bad in ([], ["x"], [3, "x"], [None], [{}]):
        fetched.clear()
        sha256 = cache.commits[0].files["tokens"]["sha256"]
        noted["files"]["tokens/c/0/0"] = [*bad, sha256]
        memory.write_text(json.dumps(noted))
        with pytest.raises(RunError, match=key):
            cache.require_complete()
        assert "tokens/c/0/0" in fetched


def test_damage_is_named_and_repaired_by_the_same_command(tmp_path, bucket):
    local, arrays, _ = small(tmp_path, length=8, top_k=4)
    cache = cache_of(bucket, local.manifest, arrays)
    key = "teacher_gap_steps/c/1/0/0"
    for damaged in (None, cache.location.read(key)[:-9]):
        put(bucket, key, damaged)
        with pytest.raises(RunError, match=f"got {key} damaged.* delete commits/000001.json"):
            Cache.open(bucket).read(range(10))
        cache.location.delete("commits/000001.json")
        cache_of(bucket, local.manifest, arrays).require_complete()
        assert bucket_bytes(bucket) == local_bytes(tmp_path)


# ---- one line each ------------------------------------------------------------------------------


def one_line_of(path: str) -> str:
    with pytest.raises(UserError) as caught:
        Cache.open(path)
    with pytest.raises(UserError) as again:
        Location(path).check_writable()
    assert str(caught.value) == str(again.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    return str(caught.value)


def test_a_missing_bucket_is_said_by_name(bucket, endpoint):
    line = f"expected a bucket missing at {endpoint} for s3://missing/cache, got none of that name;"
    assert one_line_of("s3://missing/cache") == f"{line} create it, or correct the path"


def test_a_tokenizer_cannot_be_trained_into_a_bucket(bucket):
    with pytest.raises(
        UserError, match=f"for bpe_300, .* got {bucket}; .* data.tokenizer to bpe_3"
    ):
        Location(bucket).local_path("bpe_300")


def test_wrong_credentials_are_said_with_the_variables_to_set(bucket, endpoint, environment, capfd):
    """A key that the server does not know, and a wrong secret. It asks from here on."""
    user = {"endpoint_url": endpoint, "region_name": "us-east-1"}
    iam = pytest.importorskip("boto3").client("iam", **user)
    iam.create_user(UserName="somebody")
    known = iam.create_access_key(UserName="somebody")["AccessKey"]["AccessKeyId"]
    request("POST", f"{endpoint}/moto-api/reset-auth", b"0")
    try:
        line = f"expected credentials that may list {bucket} at {endpoint}, got: PERMISSION_DENIED"
        for key, problem in (("AKIAOTHER", "InvalidAccessKeyId"), (known, "SignatureDoesNotMatch")):
            secret = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": "wrong"}
            environment(AWS_ENDPOINT_URL_S3=endpoint, **secret)
            found = one_line_of(bucket)
            assert found.startswith(f"{line}: {problem}: ")
            assert found.endswith(
                "; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            )
    finally:
        request("POST", f"{endpoint}/moto-api/reset-auth", b"inf")
    assert capfd.readouterr().err == "", "what the AWS library says of its search"


def test_an_endpoint_where_nobody_answers_or_never_is_said_within_the_deadline(
    bucket, environment, monkeypatch
):
    url = f"http://127.0.0.1:{free_port()}"
    environment(AWS_ENDPOINT_URL=url, **CREDENTIALS)
    found = one_line_of(bucket)
    assert found.startswith(
        f"expected to list {bucket} at {url}, got: ABORTED: All 1 retry attempts"
    )
    assert found.endswith("; check the path, the network and the credentials")
    monkeypatch.setattr(location, "DEADLINE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment(AWS_ENDPOINT_URL=url, **CREDENTIALS)
        line = f"expected an answer from {url} within 0 s for {bucket}, got none; check the network"
        assert one_line_of(bucket) == f"{line}, and AWS_ENDPOINT_URL"


def test_which_credentials_there_are_is_seen_without_asking_anybody(environment, tmp_path):
    environment()
    assert object_store._credentials() == "anonymous"
    assert os.environ["AWS_EC2_METADATA_DISABLED"] == "true"
    for variables in (
        {"AWS_EC2_METADATA_DISABLED": "false"},
        {"AWS_PROFILE": "mine"},
        {"AWS_WEB_IDENTITY_TOKEN_FILE": "x"},
        {"AWS_CONFIG_FILE": __file__},
    ):
        environment(**variables)
        assert object_store._credentials() == "default"
    environment(**CREDENTIALS)
    assert object_store._credentials() == "environment"
    assert "endpoint" not in object_store.spec("s3", "b", "p")
    environment(AWS_REGION="eu-north-1", AWS_ENDPOINT_URL="http://h:1/")
    found = object_store.spec("s3", "b", "p")
    assert (found["aws_region"], found["endpoint"]) == ("eu-north-1", "http://h:1")
    assert object_store.spec("gcs", "b", "p") == {"driver": "gcs", "bucket": "b", "path": "p"}


# ---- a network that breaks ----------------------------------------------------------------------


class Wire:
    """Forwards a port of its own to the server's while it is up; down, it refuses connections;
    silent, it takes what is said and says nothing."""

    def __init__(self, endpoint: str):
        self._port, self._server = free_port(), int(endpoint.rsplit(":", 1)[1])
        self.url = f"http://127.0.0.1:{self._port}"
        self._open: list[socket.socket] = []
        self.silent = False
        self.up()

    def up(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=64)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def down(self) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._server))
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.silent:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def wire(endpoint):
    made = Wire(endpoint)
    yield made
    made.down()


def test_a_server_that_stops_midway_loses_nothing(tmp_path, bucket, environment, wire):
    local, arrays, _ = small(tmp_path, length=8, top_k=4)
    environment(AWS_ENDPOINT_URL=wire.url, **CREDENTIALS)
    parts = {
        shard: {name: each[4 * shard : 4 * shard + 4] for name, each in arrays.items()}
        for shard in range(3)
    }
    with create(bucket, local.manifest, 10) as writer:
        writer.write(0, parts[0])
        wire.down()
        for _ in range(2):
            with pytest.raises(RunError, match="what is committed stays good: fix that and re-run"):
                writer.write(1, parts[1])
        wire.up()
        assert [shard for shard, *_ in writer.missing_shards()] == [1, 2]
        writer.write(1, parts[1])
        wire.down()  # and it cannot give its lock back
    wire.up()
    lock = json.loads(Location(bucket).read(LOCK))
    put(bucket, LOCK, json.dumps(lock | {"started": "1"}).encode())  # as if this process were gone
    with create(bucket, local.manifest, 10) as writer:
        assert [shard for shard, *_ in writer.missing_shards()] == [2]
        writer.write(2, parts[2])
    assert bucket_bytes(bucket) == local_bytes(tmp_path)

    cache = Cache.open(bucket)
    wire.down()
    for read in (lambda: cache.read([1, 2]), cache.require_complete, lambda: Cache.open(bucket)):
        with pytest.raises((RunError, UserError)) as caught:
            read()
        line = str(caught.value)
        assert "delete" not in line and "check the path, the network and the credentials" in line
    wire.up()
    np.testing.assert_array_equal(cache.read([1, 2]).tokens, arrays["tokens"][[1, 2]])
    cache.require_complete()


SILENCED = """
import sys
from jax_distill.base.errors import RunError
from jax_distill.cache import Cache, object_store
object_store.RETRIES = {"max_retries": 1, "initial_delay": "10ms", "max_delay": "10ms"}
cache = Cache.open(sys.argv[1])
print("open", flush=True)
input()
try:
    cache.read([0])
except RunError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_network_that_falls_silent_is_given_up(tmp_path, bucket, environment, wire):
    """In a process of its own, since curl reads how long it waits once; here a second."""
    local, arrays, _ = small(tmp_path, length=8, top_k=4)
    cache_of(bucket, local.manifest, arrays)
    assert object_store.SILENCE.items() <= os.environ.items()
    environment(AWS_ENDPOINT_URL=wire.url, **CREDENTIALS)
    seconds = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "1"}
    reader = subprocess.Popen(
        [sys.executable, "-c", SILENCED, bucket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | seconds,
        text=True,
    )
    assert reader.stdout.readline() == "open\n"
    wire.silent = True
    line = reader.communicate("\n")[0].strip()
    assert line.startswith(f"expected to read the cache at {bucket}, got: ABORTED: ")
    assert "All 1 retry attempts failed" in line and "curl_code='28'" in line
    assert line.endswith("credentials, and re-run the same command to resume")
