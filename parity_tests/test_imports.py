"""Neither package needs the other's framework: each is imported whole with it made unimportable."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
JAX = ("jax", "jaxlib", "flax", "optax", "orbax", "grain")
TORCH = ("torch", "transformers", "torch_ref")
IMPORT_ALL = """
import importlib, pkgutil, sys
package, *forbidden = sys.argv[1:]
sys.modules.update(dict.fromkeys(forbidden))  # None: importing it raises ImportError
count = 0
for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
    name = found.name.rsplit(".", 1)[-1]
    if name != "conftest" and name != "__main__" and not name.endswith("_test"):
        importlib.import_module(found.name)
        count += 1
assert not any(sys.modules.get(name) for name in forbidden)
print(count)
"""


def modules(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    return [f for f in files if not f.name.endswith("_test.py") and f.name != "conftest.py"]


def imported(file: Path) -> set[str]:
    """Top-level names of everything a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("package,forbidden", [("jax_distill", TORCH), ("torch_ref", JAX)])
def test_a_package_is_imported_whole_without_the_other_framework(package, forbidden):
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, package, *forbidden],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout) >= 10


@pytest.mark.parametrize("package,forbidden", [("jax_distill", TORCH), ("torch_ref", JAX)])
def test_no_line_imports_the_other_framework_not_even_in_a_function(package, forbidden):
    for file in modules(package):
        roots = {name.split(".")[0] for name in imported(file)}
        assert not roots & set(forbidden), file


def test_the_reference_uses_only_the_packages_of_jax_distill_that_need_no_jax():
    allowed = "base batch objective config run data cache hidden_layers loop model_folder".split()
    allowed += ["sweep", "wandb_log"]
    for file in modules("torch_ref"):
        used = {n.split(".")[1] for n in imported(file) if n.startswith("jax_distill.")}
        assert used <= {*allowed, "synthetic"}, (file, used)
