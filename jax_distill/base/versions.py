"""Which packages and which revision produced a result."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

PACKAGES = (
    "jax-distill jax jaxlib flax optax orbax-checkpoint tensorstore grain numpy tokenizers "
    "safetensors gguf scipy torch transformers"
).split()


def own_version() -> str:
    """jax_distill's own version, as its package states it."""
    try:
        return importlib.metadata.version("jax-distill")
    except importlib.metadata.PackageNotFoundError:  # a checkout that was never installed
        return "(not installed)"


def versions() -> dict[str, str]:
    """Installed versions of the packages that numbers depend on, and Python's own."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """The revision this package runs from (with `-dirty` where files differ), outside git None."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed, maybe in an environment inside another repository
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    command += ["--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
