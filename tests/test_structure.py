"""The plan of the house: imports point down only."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ROOMS = {"engine", "models", "datasets", "scripts", "tests", "train_seg", "eval"}
MAY_IMPORT = {"datasets": {"datasets"}, "models": {"models"}, "engine": {"engine", "models", "datasets"}}
FILES = [path for room in MAY_IMPORT for path in sorted((REPOSITORY / room).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Absolute names of all imported modules."""
    names = set()
    package = path.relative_to(REPOSITORY).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            names.add(".".join([*parents, *([node.module] if node.module else [])]))
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_imports_point_down(path):
    room = path.relative_to(REPOSITORY).parts[0]
    ours = {name for name in imported(path) if name.split(".")[0] in ROOMS}
    assert {name.split(".")[0] for name in ours} <= MAY_IMPORT[room]
    if "models/layers" in path.as_posix():
        assert all(name.startswith("models.layers") for name in ours)
        standard_library = {"collections", "copy", "functools", "math", "typing"}
        assert {name.split(".")[0] for name in imported(path)} <= {"torch", "triton", "models", *standard_library}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_hydra_stays_above(path):
    """Below the entries, only the schema knows Hydra's configs; everything else gets plain objects and values."""
    if path.parent == REPOSITORY / "engine" and path.name in ("config.py", "schema.py"):
        return
    assert not {"omegaconf", "hydra"} & {name.split(".")[0] for name in imported(path)}
