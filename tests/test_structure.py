"""The structure of the code: imports point down only, few modules name configuration keys, code stays short."""

import ast
import itertools
import re
import tokenize
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from engine.schema.classification import ClassificationRun
from engine.schema.evaluation import Evaluation, Prediction
from engine.schema.keys import groups_of
from engine.schema.segmentation import SegmentationRun

REPOSITORY = Path(__file__).resolve().parent.parent
ROOMS = {"engine", "models", "datasets", "scripts", "tests", "train_seg", "train_imagenet", "eval"}
MAY_IMPORT = {"datasets": {"datasets"}, "models": {"models"}, "engine": {"engine", "models", "datasets"}}
FILES = [path for room in MAY_IMPORT for path in sorted((REPOSITORY / room).rglob("*.py"))]
ENTRIES = sorted(REPOSITORY.glob("*.py"))
SCRIPTS = sorted((REPOSITORY / "scripts").rglob("*.py"))

KNOWS_HYDRA = ("engine/config.py", "engine/command_line.py", "engine/schema/")
NAMES_KEYS = ("engine/schema/", "engine/build/")
# Modules outside engine/schema and engine/build that import the schema, and the names they import.
KNOWS_SCHEMA = {
    "engine/config.py": {
        "keys.Keys",
        "keys.alternative",
        "keys.check_values",
        "keys.groups_of",
        "training.TrainingRun",
    },
    "engine/run.py": {"training.TrainingRun"},
    "engine/run_directory.py": {"training.TrainingRun"},
    "engine/command_line.py": {"keys.groups_of"},
    "engine/classification/evaluation.py": {"classification.ClassificationRun"},
    "engine/segmentation/evaluation.py": {"segmentation.SegmentationRun"},
}

MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_EQUAL_LINES = 250, 60, 5


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def imported(path: Path) -> set[str]:
    """Absolute names of all imported modules, and of the names imported from them (MODULE.NAME)."""
    names = set()
    package = path.relative_to(REPOSITORY).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            module = [*parents, *([node.module] if node.module else [])]
            names |= {".".join([*module, alias.name]) for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path):
    room = path.relative_to(REPOSITORY).parts[0]
    ours = {name for name in imported(path) if name.split(".")[0] in ROOMS}
    assert {name.split(".")[0] for name in ours} <= MAY_IMPORT[room]
    if "models/layers" in path.as_posix():
        assert all(name.startswith("models.layers.") for name in ours)
        standard_library = {
            "collections",
            "contextlib",
            "copy",
            "dataclasses",
            "functools",
            "inspect",
            "logging",
            "math",
            "operator",
            "sys",
            "threading",
            "typing",
            "warnings",
            "weakref",
        }
        assert {name.split(".")[0] for name in imported(path)} <= {"torch", "triton", "models", *standard_library}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_hydra_stays_above(path):
    """Below the entries, only the schema and its readers see Hydra's configs; all other code gets plain objects."""
    if not name_of(path).startswith(KNOWS_HYDRA):
        assert not {"omegaconf", "hydra"} & {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_schema_is_read_by_few(path):
    """`engine/build` turns the schema into objects; other modules may import only what `KNOWS_SCHEMA` lists."""
    if not name_of(path).startswith(NAMES_KEYS):
        of_schema = {name for name in imported(path) if f"{name}.".startswith("engine.schema.")}
        assert of_schema == {f"engine.schema.{name}" for name in KNOWS_SCHEMA.get(name_of(path), ())}


def keys_of(schema: type, prefix: str = "") -> Iterator[str]:
    """Every key of `schema`, for all alternatives of all groups."""
    types, groups = get_type_hints(schema), groups_of(schema)
    for entry in fields(schema):
        alternatives = groups.get(entry.name, {"": types[entry.name]}).values()
        for alternative in alternatives:
            if is_dataclass(alternative):
                yield from keys_of(alternative, f"{prefix}{entry.name}.")
            else:
                yield prefix + entry.name


KEYS = {
    key
    for schema in (SegmentationRun, ClassificationRun, Evaluation, Prediction)
    for key in keys_of(schema)
    if "." in key
}
KEY = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, sorted(KEYS)))})(?!\w)")


def keys_in_strings(path: Path) -> set[str]:
    """Configuration keys in a file's strings, including parts of f-strings but not docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = [node.value for node in nodes if is_string(node)]
    strings = [node.value for node in nodes if is_text(node) and node not in docstrings]
    return {key for string in strings for key in KEY.findall(string)}


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_string(node: ast.AST) -> bool:
    """Whether a statement is just a string, like a docstring."""
    return isinstance(node, ast.Expr) and is_text(node.value)


def test_keys_are_found_where_they_are():
    """Otherwise the next test could not fail."""
    assert {"optim.lr", "norm.gamma_floor", "body.dropout", "data.lists", "data.colour_jitter.hue", "tta.flip"} <= KEYS
    assert {"window.size", "sampler.folder", "loss.fraction", "data.split", "init.weights"} <= KEYS
    found = {key for path in FILES if name_of(path).startswith(NAMES_KEYS) for key in keys_in_strings(path)}
    assert {"optim.lr", "data.root", "init.weights", "sampler.folder"} <= found  # two of them in f-strings


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_keys_are_named_where_they_are_read(path):
    """Only the schema, engine/build, the entries and the scripts spell keys as users do."""
    assert name_of(path).startswith(NAMES_KEYS) or not keys_in_strings(path)


def comments(path: Path) -> dict[int, str]:
    """Comments by line number, without comments for tools."""
    with open(path, "rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    return {token.start[0]: token.string for token in tokens if not re.match(r"# *(noqa|type:|fmt:)", token.string)}


@pytest.mark.parametrize("path", [*ENTRIES, *FILES, *SCRIPTS], ids=name_of)
def test_code_is_short_or_says_why_it_is_not(path):
    """The reason is a comment: for a file before its first statement, for a function on its `def` line."""
    source, reasons = path.read_text(), comments(path)
    tree = ast.parse(source)
    first = next((node.lineno for node in tree.body if not is_string(node)), 1)
    lines = len(source.splitlines())
    assert lines <= MOST_LINES or any(line < first for line in reasons), f"{lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MOST_LINES_OF_A_FUNCTION or node.lineno in reasons, f"{node.name}: {lines} lines"


def windows(source: str) -> set[tuple[str, ...]]:
    """All runs of MOST_EQUAL_LINES + 1 lines, without indentation, blank lines and imports."""
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    left_out = {number for node in imports for number in range(node.lineno, node.end_lineno + 1)}
    numbered = [(number, line.strip()) for number, line in enumerate(source.splitlines(), start=1)]
    lines = [line for number, line in numbered if line and number not in left_out]
    return {tuple(lines[start : start + MOST_EQUAL_LINES + 1]) for start in range(len(lines) - MOST_EQUAL_LINES)}


def test_copied_functions_are_found_and_equal_imports_are_no_copy():
    """Otherwise the next test could not fail."""
    one, other = ((REPOSITORY / name).read_text() for name in ("train_seg.py", "eval.py"))
    for kinds, found in (((ast.Import, ast.ImportFrom), False), (ast.FunctionDef, True)):
        copied = [ast.get_source_segment(one, node) for node in ast.parse(one).body if isinstance(node, kinds)]
        assert len("\n".join(copied).splitlines()) > MOST_EQUAL_LINES
        assert bool(windows(one) & windows("\n".join([*copied, other]))) == found


@pytest.mark.parametrize("one, other", list(itertools.combinations(ENTRIES, 2)), ids=name_of)
def test_entries_share_no_code(one, other):
    """Code that two tasks share belongs in the engine, once."""
    assert not windows(one.read_text()) & windows(other.read_text())
