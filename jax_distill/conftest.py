"""Strict JAX for every test here: no silent promotion, no silent broadcasting, 8 devices."""

import gc
import os
import subprocess
from importlib import metadata

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    # The suite's time goes into compiling small programs that run once, so XLA does not optimise
    # them, except where an instruction set is asked for. The README's commands are optimised.
    if "xla_cpu_max_isa" not in flags:
        flags += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        # The older emitters take about half as long as the newer ones. JAX 0.11 has them no more
        # and refuses the flag.
        if tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11):
            flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = flags.strip()

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes millions of small objects that live on. Python's default, a collection at every 700
# new ones, takes a twentieth of the suite's time.
gc.set_threshold(200_000)

# The same draws at every run and on every machine, whose speed is nothing to them either.
hypothesis.settings.register_profile("same", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("same")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Below AVX2 XLA has no code that converts float16, and cannot compile it: no fault of ours,
    and no processor that JAX's wheels run on. A test that meets it, itself or in the output of a
    process that its assertion shows, is left out and says why."""
    report = yield
    missing = call.excinfo and "Failed to materialize symbols" in str(call.excinfo.value)
    if missing and "xla_cpu_max_isa" in os.environ["XLA_FLAGS"]:
        reason = "Skipped: XLA has no float16 for this instruction set"
        report.outcome, report.longrepr = "skipped", (*item.location[:2], reason)
    return report


def on_devices(count: int) -> dict[str, str]:
    """The environment of a process with so many simulated devices, that compiles as the suite does:
    the numbers of two compilers are the same to rounding alone."""
    flag = "--xla_force_host_platform_device_count"
    flags = [each for each in os.environ["XLA_FLAGS"].split() if not each.startswith(flag)]
    return os.environ | {"XLA_FLAGS": " ".join([*flags, f"{flag}={count}"])}


@pytest.fixture
def optax_promotion():
    """optax's own arithmetic mixes ints and floats; everything of ours stays strict."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, 6 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", "-R", "-l", str(place)], check=True)
