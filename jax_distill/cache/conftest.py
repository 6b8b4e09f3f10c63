"""An S3 server on this machine, and a folder of a bucket in it for each test."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import tensorstore as ts

from jax_distill.cache import Location, object_store
from jax_distill.cache.location import LOCK
from jax_distill.cache_test import folder_bytes

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "secret"}
NO_PATIENCE = {"max_retries": 1, "initial_delay": "10ms", "max_delay": "10ms"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def request(method: str, url: str, data: bytes | None = None) -> None:
    headers = {"Content-Type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method)).close()


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory):
    """The URL of an S3 server that has the bucket `caches`."""
    pytest.importorskip("moto", reason="the S3 server comes with the extra test")
    log = tmp_path_factory.mktemp("moto") / "log"
    port = free_port()
    program = "import sys; from moto.server import main; main(sys.argv[1:])"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", program, "-H", "127.0.0.1", "-p", str(port)],
            stdout=file,
            stderr=file,
        )
    for _ in range(1200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    request("PUT", f"http://127.0.0.1:{port}/caches")
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture
def environment(monkeypatch):
    """Sets the variables that object stores are reached by, which are read once a process."""

    def set_to(**variables: str) -> None:
        for name in [name for name in os.environ if name.startswith(("AWS_", "HOME"))]:
            monkeypatch.delenv(name)
        for name, value in ({"HOME": "/nowhere"} | variables).items():
            monkeypatch.setenv(name, value)
        object_store.context.cache_clear()

    monkeypatch.setattr(object_store, "RETRIES", NO_PATIENCE)
    yield set_to
    monkeypatch.undo()
    object_store.context.cache_clear()


@pytest.fixture
def bucket(endpoint, environment, request):
    """An empty folder of the bucket, for the test alone."""
    environment(AWS_ENDPOINT_URL=endpoint, **CREDENTIALS)
    return f"s3://caches/{request.node.name}"


def bucket_bytes(path: str) -> dict[str, bytes]:
    store = ts.KvStore.open(Location(path).spec(), context=object_store.context()).result()
    keys = [key.decode() for key in store.list().result()]
    return {key: store.read(key).result().value for key in keys if key != LOCK}


def local_bytes(path: Path) -> dict[str, bytes]:
    return {key: x for key, x in folder_bytes(path).items() if not key.startswith(LOCK)}


def put(path: str, key: str, content: bytes | None) -> None:
    Location(path)._store.write(key, content).result()
