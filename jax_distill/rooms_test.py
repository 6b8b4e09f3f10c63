"""The house: no import upward, no cycles, no project import inside a function, no torch."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent
FLOORS = {
    "config": 0,
    "run": 1,
    "card": 1,
    "data": 1,
    "cache": 1,
    "losses": 1,
    "model": 1,
    "sharding": 1,
    "optimizer": 1,
    "devices": 1,
    "rounding": 1,
    "packing": 2,
    "hf": 2,
    "checkpoint": 2,
    "layerwise": 2,
    "step": 2,
    "teacher": 3,
    "student": 3,
    "evaluate": 3,
    "export": 3,
    "audit": 3,
    "report": 3,
    "train": 4,
    "plan": 5,
    "bench": 5,
}


def sources() -> list[Path]:
    return [
        path
        for path in sorted(ROOT.rglob("*.py"))
        if not path.name.endswith("_test.py")
        and path.name != "conftest.py"
        and path.parent != ROOT / "configs"
        and path != ROOT / "__init__.py"
    ]


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module:
        if node.module == "jax_distill":
            return [alias.name for alias in node.names]
        if node.module.startswith("jax_distill."):
            return [node.module.split(".")[1]]
    if isinstance(node, ast.Import):
        names = [alias.name.split(".") for alias in node.names]
        return [name[1] for name in names if name[0] == "jax_distill" and len(name) > 1]
    return []


def test_every_room_has_a_floor():
    assert {room(path) for path in sources()} <= FLOORS.keys()


def test_no_import_goes_upward():
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for other in imported_rooms(node):
                assert FLOORS[other] <= FLOORS[room(path)], f"{path} imports {other}"


def test_no_cycle_between_rooms():
    edges: dict[str, set[str]] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            others = set(imported_rooms(node)) - {room(path)}
            edges.setdefault(room(path), set()).update(others)
    left = dict(edges)
    while left:
        free = [name for name, others in left.items() if not others & left.keys()]
        assert free, f"a cycle among {sorted(left)}"
        for name in free:
            del left[name]


def test_no_project_import_inside_a_function():
    for path in sources():
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = [name for node in ast.walk(function) for name in imported_rooms(node)]
                assert not inside, f"{path}: {function.name} imports {inside}"


def test_nothing_imports_torch():
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong = [n for n in names if n.split(".")[0] in ("torch", "transformers", "torch_ref")]
            assert not wrong, f"{path} imports {wrong}"
