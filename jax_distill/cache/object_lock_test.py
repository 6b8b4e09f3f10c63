"""One writer at a time on an object store, and what a killed one leaves."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from jax_distill.base.errors import UserError
from jax_distill.cache import Cache, Location, create, object_lock
from jax_distill.cache.conftest import CREDENTIALS, bucket_bytes, local_bytes, put
from jax_distill.cache.location import LOCK, Bucket
from jax_distill.cache_test import small

KILLED = """
import os, pickle, signal, sys
from jax_distill.cache import Manifest, create, location
path, arrays, manifest, at = sys.argv[1:]
arrays = pickle.load(open(arrays, "rb"))
manifest = Manifest.parse(open(manifest, "rb").read(), "")
write = location.Location.write

def killed(self, key, content):
    if key == at:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, key, content)

location.Location.write = killed
with create(path, manifest, None) as writer:
    for shard in sorted({0, 1, 2} - set(writer.committed())):
        first = 4 * shard
        writer.write(shard, {name: each[first : first + 4] for name, each in arrays.items()})
    writer.finish(10)
"""


def test_killed_writers_are_resumed_at_once_and_the_last_ends_with_the_same_bytes(tmp_path, bucket):
    """The lock of each is there, and its process is not; so is a shard without its commit. How many
    rows come they do not know, as where text is a stream."""
    local, arrays, _ = small(tmp_path / "local", length=8, top_k=4)
    (tmp_path / "arrays").write_bytes(pickle.dumps(arrays))
    files = [str(tmp_path / "arrays"), str(tmp_path / "local/manifest.json")]
    for at in ("manifest.json", "commits/000001.json"):
        words = [bucket, *files, at]
        killed = subprocess.Popen([sys.executable, "-c", KILLED, *words])
        assert os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT).si_status == signal.SIGKILL
        assert Location(bucket).active_writer() is None, "a zombie writes no more"
        assert killed.wait() == -signal.SIGKILL
        assert json.loads(Location(bucket).read(LOCK))["pid"] == killed.pid
        left = bucket_bytes(bucket)
        assert at not in left and ("tokens/c/1/0" in left) == (at == "commits/000001.json")
    said = subprocess.run([sys.executable, "-c", KILLED, bucket, *files, ""], capture_output=True)
    assert said.returncode == 0 and said.stderr == b"", "and the AWS library says nothing"
    Cache.open(bucket).require_complete()
    there, here = bucket_bytes(bucket), local_bytes(tmp_path / "local")
    assert {k: x for k, x in there.items() if "/head-" not in k} == {
        k: x for k, x in here.items() if "/head-" not in k
    }
    assert Location(bucket).read(LOCK) is None


def test_a_second_writer_is_refused_and_the_first_one_goes_on(tmp_path, bucket):
    local, arrays, _ = small(tmp_path, length=8, top_k=4)
    with create(bucket, local.manifest, 10) as writer:
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} on .* since 20.*Z; "):
            create(bucket, local.manifest, 10)
        assert f"process {os.getpid()}" in Cache.open(bucket).location.active_writer()
        with pytest.raises(UserError, match="a writer is active .process"):
            Cache.open(bucket).require_complete()
        for shard, first, last in writer.missing_shards():
            writer.write(shard, {name: each[first : last + 1] for name, each in arrays.items()})
    assert bucket_bytes(bucket) == local_bytes(tmp_path)


def lock_of(at: Bucket, **changes) -> bytes:
    """The lock that this process would have there, but for some fields."""
    lock = at.lock()
    content = json.loads(at.read(LOCK))
    lock.release()
    return json.dumps(content | changes).encode()


def test_a_lock_whose_owner_may_live_is_kept_and_the_refusal_says_how_to_remove_it(
    bucket, monkeypatch
):
    at = Location(bucket)
    hidden = lock_of(at, started="12345")
    for content in (
        lock_of(at, machine="another one", started="1", owner="process 7 on elsewhere"),
        lock_of(at, pid="7"),
        *(b"", b"{", b"[]", b"3", b'{"owner": "x"}'),
    ):
        put(bucket, LOCK, content)
        with pytest.raises(UserError, match=f"if it is no more, delete {bucket}/{LOCK} and re-run"):
            at.lock()
        owner = at.active_writer()
        assert owner is not None
        assert ("elsewhere" in owner) == (b"elsewhere" in content)
        assert at.read(LOCK) == content
    with monkeypatch.context() as patch:  # another user's process, which this one cannot look at
        patch.setattr(object_lock, "_started", lambda _: object_lock.RUNNING)
        put(bucket, LOCK, hidden)
        with pytest.raises(UserError, match="if it is no more, delete"):
            at.lock()
    put(bucket, LOCK, None)
    at.lock().release()


def test_the_lock_of_a_process_that_is_gone_goes_to_one_of_those_who_want_it(bucket):
    """Also where another process has its number by now."""
    at = Location(bucket)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for changes in ({"pid": ended.pid, "started": "1"}, {"started": "1"}):
        put(bucket, LOCK, lock_of(at, **changes))
        assert at.active_writer() is None
        taken = []
        barrier = threading.Barrier(8)

        def take(_: int, taken=taken, barrier=barrier) -> None:
            barrier.wait()
            with contextlib.suppress(UserError):
                taken.append(at.lock())

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(take, range(8)))
        assert len(taken) == 1
        taken[0].release()
        assert at.read(LOCK) is None


def test_who_lost_the_lock_releases_nobody_elses(bucket):
    at = Location(bucket)
    lock = at.lock()
    put(bucket, LOCK, b"somebody else's")
    lock.release()
    lock.release()
    assert at.read(LOCK) == b"somebody else's"


class Refusing(BaseHTTPRequestHandler):
    """An S3 server that refuses every PUT, as where somebody else was quicker; `keeps` what came
    all the same, as where an answer was lost and the request was sent again."""

    keeps, content = False, b""

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, code: int, content: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if "list-type" in self.path:
            self.answer(
                200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
            )
        else:
            self.answer(200 if self.content else 404, self.content)

    def do_HEAD(self) -> None:
        self.answer(404)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.keeps:
            type(self).content = content
        self.answer(412)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_lock_that_is_never_granted_is_said_and_one_whose_answer_was_lost_is_ours(
    environment, keeps
):
    handler = type("Handler", (Refusing,), {"keeps": keeps})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment(AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_port}", **CREDENTIALS)
        at = Location("s3://caches/refused")
        if keeps:
            lock = at.lock()
            assert at.read(LOCK) == handler.content
            lock.release()
        else:
            with pytest.raises(UserError, match=f"create s3://caches/refused/{LOCK}, got 10 refus"):
                at.lock()
        server.shutdown()
