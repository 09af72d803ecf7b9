"""The structure of the code: imports point down only, few modules name configuration keys, code stays short."""

import ast
import functools
import graphlib
import itertools
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.schema.classification import ClassificationRun
from engine.schema.evaluation import Evaluation, Prediction
from engine.schema.keys import declared_in
from engine.schema.segmentation import SegmentationRun

REPOSITORY = Path(__file__).resolve().parent.parent
ROOMS = {"engine", "keepless", "models", "datasets", "scripts", "tests", "train_seg", "train_imagenet", "eval"}
MAY_IMPORT = {
    "datasets": {"datasets"},
    "keepless": {"keepless"},
    "models": {"keepless", "models"},
    "engine": {"datasets", "engine", "keepless", "models"},
}
KEEPLESS_IMPORTS = {"torch", "triton", "keepless"} | sys.stdlib_module_names  # it is installed without the rest

KNOWS_HYDRA = ("engine/configuration/", "engine/schema/")
NAMES_KEYS = (
    "engine/schema/",
    "engine/assemble/",
    "engine/training/build.py",
    "engine/training/planner.py",
    "engine/checkpoint/initial_weights.py",
)
# The rooms of the engine that may know the schema; the others take explicit arguments.
KNOWS_SCHEMA = {"configuration", "assemble", "checkpoint", "training", "prediction"}

LONGEST = {"train_seg.py": 90, "train_imagenet.py": 60}
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 400, 60


class Source:
    """A file of the repository, read and parsed once."""

    def __init__(self, path: Path):
        self.path, self.name = path, path.relative_to(REPOSITORY).as_posix()
        self.room = self.name.split("/")[0]
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.nodes = list(ast.walk(self.tree))

    @property
    def module(self) -> str:
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @functools.cached_property
    def imported(self) -> set[str]:
        """Absolute names of all imported modules, and of the names imported from them (MODULE.NAME)."""
        names = set()
        package = self.path.relative_to(REPOSITORY).parent.parts
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parents = package[: len(package) - node.level + 1] if node.level else ()
                module = [*parents, *([node.module] if node.module else [])]
                names |= {".".join([*module, alias.name]) for alias in node.names}
        return names

    def keys(self) -> set[str]:
        """Configuration keys in the file's strings, including parts of f-strings but not docstrings."""
        docstrings = [node.value for node in self.nodes if is_string(node)]
        strings = [node.value for node in self.nodes if is_text(node) and node not in docstrings]
        return {key for string in strings for key in KEY.findall(string)}

    def comments(self) -> dict[int, str]:
        """Comments by line number, without comments for tools."""
        with open(self.path, "rb") as file:
            tokens = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
        return {token.start[0]: token.string for token in tokens if not re.match(r"# *(noqa|type:|fmt:)", token.string)}


def sources(*folders: str) -> list[Source]:
    """The files below folders; the entries, which lie in the repository's root, for ""."""
    found = [sorted((REPOSITORY / folder).rglob("*.py") if folder else REPOSITORY.glob("*.py")) for folder in folders]
    return [source_of(path) for path in itertools.chain(*found)]


source_of = functools.cache(Source)


@pytest.fixture(autouse=True, scope="module")
def forgotten():
    """300,000 nodes of syntax trees."""
    yield
    source_of.cache_clear()


def room_of(name: str) -> str:
    """The first part of an imported name."""
    return name.split(".")[0]


def test_imports_point_down():
    wrong = []
    for source in sources(*MAY_IMPORT):
        ours = {name for name in source.imported if room_of(name) in ROOMS}
        wrong += [(source.name, name) for name in ours if room_of(name) not in MAY_IMPORT[source.room]]
        if source.room == "keepless":
            wrong += [(source.name, name) for name in source.imported if room_of(name) not in KEEPLESS_IMPORTS]
    evidence = ("scripts/evidence/", "scripts/gpu_evidence.py")
    commands = [source for source in sources("scripts") if not source.name.startswith(evidence)]
    wrong += [(source.name, n) for source in commands for n in source.imported if n.startswith("scripts.evidence")]
    assert wrong == []


def imports_among(files: dict[str, Source]) -> Iterator[tuple[str, str]]:
    """Yields (module, module that it imports); also where only type checkers import, and of packages their __init__."""
    for module, source in files.items():
        for name in source.imported:
            found = next((known for known in (name, name.rpartition(".")[0]) if known in files), None)
            if found not in (None, module):
                yield module, found


def test_no_file_or_folder_imports_itself_through_others():
    files = {source.module: source for source in sources("", *MAY_IMPORT, "scripts")}
    graphs = {}
    for pair in imports_among(files):
        places = [(*files[module].path.parent.parts, files[module].path.stem) for module in pair]
        shared = os.path.commonprefix(places)
        importing, imported = (place[len(shared)] for place in places)
        graphs.setdefault(shared, {}).setdefault(importing, set()).add(imported)
    assert {shared[-1] for shared in graphs} >= {REPOSITORY.name, *MAY_IMPORT, "scripts"}
    for graph in graphs.values():
        graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    "folders, depth, most",
    [
        (("", *MAY_IMPORT, "scripts"), 0, (9, 5, 14)),
        (("engine",), 1, (10, 5, 31)),
        (("keepless/recompute",), 2, (6, 5, 13)),  # with the door, `recompute_activations`: 7, 6, 18
    ],
)
def test_folders_are_few_in_few_layers_with_few_pairs_that_import(folders, depth, most):
    """A layer imports only layers below. Entries and `setup` count as folders."""
    files = {source.module: source for source in sources(*folders) if source.module.count(".") >= depth}
    folder = {module: module.split(".")[depth] for module in files}
    pairs = {(folder[module], folder[used]) for module, used in imports_among(files)}
    below = {user: {used for other, used in pairs if other == user != used} for user in folder.values()}
    sorter, layers = graphlib.TopologicalSorter(below), 0
    sorter.prepare()
    while sorter.is_active():
        sorter.done(*sorter.get_ready())
        layers += 1
    found = len(below), layers, sum(map(len, below.values()))
    assert all(number <= limit for number, limit in zip(found, most, strict=True)), found


def test_hydra_stays_above():
    """Below the entries, only the schema and its readers see Hydra's configs; all other code gets plain objects."""
    below = [source for source in sources(*MAY_IMPORT) if not source.name.startswith(KNOWS_HYDRA)]
    assert [s.name for s in below if {"omegaconf", "hydra"} & set(map(room_of, s.imported))] == []


def test_the_schema_is_read_by_few():
    """Datasets, networks and evaluations take explicit arguments."""
    readers = {s.name for s in sources(*MAY_IMPORT) if any(f"{n}.".startswith("engine.schema.") for n in s.imported)}
    assert {tuple(name.split("/")[:2]) for name in readers} == {("engine", room) for room in {"schema", *KNOWS_SCHEMA}}


SCHEMAS = (SegmentationRun, ClassificationRun, Evaluation, Prediction)
KEYS = {key for schema in SCHEMAS for key in declared_in(schema) if "." in key}
KEY = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, sorted(KEYS)))})(?!\w)")
GROUPS = {entry.name for entry in (REPOSITORY / "configs").iterdir() if entry.is_dir()} | {"init", "resume"}
KEY_OR_CHOICE = re.compile(rf"(?<![\w./])(?:{'|'.join(sorted(GROUPS))})(?:\.(?!py\b)[a-z_]+|=\w+)")


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_string(node: ast.AST) -> bool:
    """Whether a statement is just a string, like a docstring."""
    return isinstance(node, ast.Expr) and is_text(node.value)


def test_keys_are_named_where_they_are_read():
    """Only the schema, engine/assemble, the entries and the scripts spell keys as users do."""
    assert {"optim.lr", "norm.gamma_floor", "body.dropout", "data.lists", "data.colour_jitter.hue", "tta.flip"} <= KEYS
    assert {"window.size", "sampler.folder", "loss.fraction", "data.split", "init.weights"} <= KEYS
    keys = {source.name: source.keys() for source in sources(*MAY_IMPORT)}
    found = set().union(*(own for name, own in keys.items() if name.startswith(NAMES_KEYS)))
    assert {"optim.lr", "data.root", "init.weights", "sampler.folder"} <= found  # two of them in f-strings
    assert {name: own for name, own in keys.items() if own and not name.startswith(NAMES_KEYS)} == {}


def test_datasets_name_no_key_and_no_choice_of_a_group():
    """Docstrings count: messages name arguments, or keys that the caller passes in."""
    assert KEY_OR_CHOICE.findall("data.root=DIR, sampler=uniform (docs/data.md)") == ["data.root", "sampler=uniform"]
    texts = {source.name: [node.value for node in source.nodes if is_text(node)] for source in sources("datasets")}
    found = {name: KEY_OR_CHOICE.findall("\n".join(own)) for name, own in texts.items()}
    assert {name: own for name, own in found.items() if own} == {}


def test_code_is_short_or_says_why_it_is_not():
    """The reason is a comment: for a file before its first statement, for a function on its `def` line."""
    wrong = []
    for source in sources("", *MAY_IMPORT, "scripts"):
        reasons = source.comments()
        first = next((node.lineno for node in source.tree.body if not is_string(node)), 1)
        lines = len(source.text.splitlines())
        if lines > LONGEST.get(source.name, MOST_LINES) and not any(line < first for line in reasons):
            wrong.append(f"{source.name}: {lines} lines")
        for node in source.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION and node.lineno not in reasons:
                    wrong.append(f"{source.name}, {node.name}: {lines} lines")
    assert wrong == []


def test_a_file_name_is_used_once():
    """Keys, what is built from them, and measurements are named after their subject; the tasks after themselves."""
    of_a_subject = ("engine/schema/", "engine/assemble/", "scripts/evidence/")
    shared = {"__init__", "segmentation", "classification"}
    named: dict[str, list[str]] = {}
    for source in sources("", *MAY_IMPORT, "scripts"):
        if not source.name.startswith(of_a_subject) and source.path.stem not in shared:
            named.setdefault(source.path.stem, []).append(source.name)
    assert {stem: files for stem, files in named.items() if len(files) > 1} == {}
