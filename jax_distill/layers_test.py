"""The architecture: no import upward, no cycle, no import inside a function, nobody's secrets."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent

# Lowest first. A package may import those of lower layers, and of its own where no cycle results.
LAYERS = (
    ("base", "objective"),
    ("config", "batch"),
    ("sweep",),
    ("train",),
    ("run", "wandb_log", "model_folder", "data", "synthetic"),
    ("cache", "packing"),
    ("hidden_layers", "compare", "processes"),
    ("devices", "sharding", "attention", "losses"),
    ("model",),
    ("hf", "targets", "importance"),
    ("training", "teacher"),
    (
        "verify",
        "student",
        "by_source",
        "samples",
        "disagreements",
        "html_tables",
        "preview",
        "repair",
        "grow",
        "import_logprobs",
    ),
    ("evaluate", "report", "tasks"),
    ("export", "audit", "loop", "doctor"),
    ("fit",),
    ("distil",),
    ("plan",),
    ("bench",),
    ("__main__",),
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
# What a package must not import although it is lower, or is another's framework.
FORBIDDEN = {
    "base": {"jax"},
    "objective": {"jax", "numpy"},
    "config": {"jax"},
    "batch": {"jax"},
    "synthetic": {"jax"},
    "run": {"jax"},
    "wandb_log": {"jax"},
    "model_folder": {"jax", "config"},
    "data": {"jax"},
    "cache": {"jax", "config"},
    "hidden_layers": {"jax"},
    "compare": {"jax", "config"},
    "html_tables": {"jax"},
    "report": {"jax"},
    "loop": {"jax"},
    "losses": {"config", "base"},
    "attention": {"config"},
    "model": {"config"},
    "hf": {"config"},
    "targets": {"config"},
    "training": {"teacher"},
    "teacher": {"training"},
    "plan": {"bench"},
    "__main__": {"jax"},
}
COMMANDS = {"student", "evaluate", "export", "audit", "report", "distil", "doctor"}
MAY_USE_COMMANDS = {"distil", "plan", "bench", "loop", "doctor"}


def sources() -> list[Path]:
    return [
        path
        for path in sorted(ROOT.rglob("*.py"))
        if not path.name.endswith("_test.py")
        and path.name != "conftest.py"
        and path.parent != ROOT / "configs"
        and path != ROOT / "__init__.py"
    ]


def package(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(node: ast.AST) -> list[str]:
    """Dotted names; `from jax_distill import hf` is jax_distill.hf."""
    if isinstance(node, ast.ImportFrom) and node.module:
        if node.module == "jax_distill":
            return [f"jax_distill.{alias.name}" for alias in node.names]
        return [node.module]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def imported_packages(node: ast.AST) -> set[str]:
    """Ours by their own name, others by their first (`jax`)."""
    found = set()
    for name in imported_modules(node):
        first, *rest = name.split(".")
        found.add(rest[0] if first == "jax_distill" and rest else first)
    return found


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return set().union(*(imported_packages(node) for node in ast.walk(tree)))


def test_every_package_has_a_layer():
    assert {package(path) for path in sources()} == LAYER.keys()


def test_no_import_goes_upward():
    for path in sources():
        for other in imports_of(path) & LAYER.keys():
            assert LAYER[other] <= LAYER[package(path)], f"{path} imports {other}"


def test_no_package_imports_what_it_must_not_know():
    for path in sources():
        wrong = imports_of(path) & FORBIDDEN.get(package(path), set())
        assert not wrong, f"{path} imports {wrong}"


def test_commands_do_not_import_each_other():
    for path in sources():
        name = package(path)
        if name in COMMANDS - MAY_USE_COMMANDS:
            wrong = (imports_of(path) & COMMANDS) - {name}
            assert not wrong, f"{path} imports {wrong}"


def test_no_cycle_between_packages():
    edges: dict[str, set[str]] = {name: set() for name in LAYER}
    for path in sources():
        edges[package(path)] |= (imports_of(path) & LAYER.keys()) - {package(path)}
    while edges:
        free = [name for name, others in edges.items() if not others & edges.keys()]
        assert free, f"a cycle among {sorted(edges)}"
        for name in free:
            del edges[name]


def test_no_project_import_inside_a_function():
    for path in sources():
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = {name for node in ast.walk(function) for name in imported_packages(node)}
                assert not inside & LAYER.keys(), f"{path}: {function.name} imports {inside}"


def test_nothing_imports_torch():
    for path in sources():
        wrong = imports_of(path) & {"torch", "transformers", "torch_ref"}
        assert not wrong, f"{path} imports {wrong}"
