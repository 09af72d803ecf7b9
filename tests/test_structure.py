"""The structure of the code: imports point down only, without circles, among few folders."""

import ast
import functools
import graphlib
import importlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ENTRIES = {path.stem for path in REPOSITORY.glob("*.py")}
PACKAGES = {"engine", "keepless", "models", "datasets", "scripts", "benchmarks", "tools", "tests"}
ROOMS = {*PACKAGES, *ENTRIES}
MAY_IMPORT = {
    "datasets": {"datasets"},
    "keepless": {"keepless"},
    "models": {"keepless", "models"},
    "engine": {"datasets", "engine", "keepless", "models"},
    "scripts": ROOMS - {"benchmarks", "tools", "tests"},
}  # nothing but tests imports `benchmarks` and `tools`
# It is installed without the rest: triton is optional.
KEEPLESS_IMPORTS = {"torch", "triton", "keepless"} | sys.stdlib_module_names
# Its face: the modules whose `__all__` the other rooms of the product may import.
KEEPLESS_FACE = ("keepless", "keepless.fit", "keepless.losses", "keepless.norms", "keepless.units")
# What they import besides: (file, module of keepless) -> why it is not public.
KEEPLESS_INSIDE = {
    ("engine/training/build.py", "keepless.norms.backends.compiled"): "the message names the asking key of ours",
    ("engine/training/planner.py", "keepless.made_tensors"): "bytes of tensors are counted as in `keepless.fit`",
    ("engine/training/planner.py", "keepless.recompute.signatures.plans"): "the fewest bytes that a budget may have",
    ("engine/training/planner.py", "keepless.recompute.step.costs"): "ranks estimate times for the same device",
    ("engine/training/planner.py", "keepless.saved"): "bytes saved for backward, which plan_memory prints",
    ("models/bodies/library.py", "keepless.conversion.convert"): "norms of libraries, replaced as in `to_inplace`",
    ("models/private_torch.py", "keepless.torch_internals"): "a context around captures, which keepless has as well",
}
# The rooms of the engine that may know the schema; the others take explicit arguments.
KNOWS_SCHEMA = {"configuration", "assemble", "checkpoint", "training", "prediction"}


class Source:
    """A file of the repository, and what it imports."""

    def __init__(self, path: Path):
        self.path, self.name = path, path.relative_to(REPOSITORY).as_posix()
        self.room = self.name.split("/")[0]
        self.module = self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.imported = set(imports_of(path))
        if self.module == "engine.assemble.contracts":
            self.imported |= {*built_by_choices()}


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names of all imported modules, and of the names imported from them (MODULE.NAME)."""
    package = path.relative_to(REPOSITORY).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            module = [*parents, *([node.module] if node.module else [])]
            yield from (".".join([*module, alias.name]) for alias in node.names)


def built_by_choices() -> Iterator[str]:
    """The names of what choices build. No file imports these modules: `engine.assemble.contracts` does, by name."""
    for path in (REPOSITORY / "engine" / "schema").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "builds":
                assert isinstance(node.value, ast.Constant), f"{path}: write builds as a text, for tests that read it"
                yield node.value.value


def sources(*folders: str) -> list[Source]:
    """The files below folders; the entries, which lie in the repository's root, for ""."""
    paths = [sorted((REPOSITORY / folder).rglob("*.py") if folder else REPOSITORY.glob("*.py")) for folder in folders]
    return [source_of(path) for path in itertools.chain(*paths)]


source_of = functools.cache(Source)


def test_imports_point_down():
    wrong = []
    for source in sources(*MAY_IMPORT):
        for name in source.imported:
            room = name.split(".")[0]
            is_wrong = room in ROOMS and room not in MAY_IMPORT[source.room]
            if is_wrong or (source.room == "keepless" and room not in KEEPLESS_IMPORTS):
                wrong.append((source.name, name))
    advice = "move what they need to a lower room, or take it as an argument (CONTRIBUTING.md, 'Map of the code')"
    assert not wrong, f"{wrong}: these files may not import these names: {advice}"


def test_the_product_imports_keepless_by_its_face():
    """Benchmarks and tools are left out: they measure the inside."""
    face = {f"{module}.{name}" for module in KEEPLESS_FACE for name in importlib.import_module(module).__all__}
    inside = set()
    for source in sources("", *MAY_IMPORT.keys() - {"keepless"}):
        for name in source.imported - face:
            if name.startswith("keepless."):
                inside.add((source.name, name.rpartition(".")[0]))
    advice = "make it public with a docstring, or move it to the room that needs it; if neither, list it with a reason"
    assert inside == KEEPLESS_INSIDE.keys(), f"{inside ^ KEEPLESS_INSIDE.keys()}: {advice}"
    assert len(inside) <= 12


def imports_among(files: dict[str, Source]) -> Iterator[tuple[str, str]]:
    """Yields (module, module that it imports); also where only type checkers import, and of packages their __init__."""
    for module, source in files.items():
        for name in source.imported:
            imported = next((candidate for candidate in (name, name.rpartition(".")[0]) if candidate in files), None)
            if imported not in (None, module):
                yield module, imported


def test_no_file_or_folder_imports_itself_through_others():
    files = {source.module: source for source in sources("", *MAY_IMPORT, "benchmarks", "tools")}
    graphs = {}
    for pair in imports_among(files):
        places = [(*files[module].path.parent.parts, files[module].path.stem) for module in pair]
        shared = os.path.commonprefix(places)
        importing, imported = (place[len(shared)] for place in places)
        graphs.setdefault(shared, {}).setdefault(importing, set()).add(imported)
    assert {shared[-1] for shared in graphs} >= {REPOSITORY.name, *MAY_IMPORT, "benchmarks"}
    for graph in graphs.values():
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            advice = "move what both need to a file that neither imports, or cut the file where another topic begins"
            raise AssertionError(f"{' <- '.join(error.args[1])} import each other: {advice}") from error


@pytest.mark.parametrize(
    "folders, depth, most",
    [
        (("", *MAY_IMPORT), 0, (10, 5, 13)),
        (("engine",), 1, (10, 5, 30)),
        (("keepless/recompute",), 2, (6, 5, 13)),  # with the door, `recompute_activations`: 7, 6, 18
    ],
)
def test_folders_are_few_in_few_layers_with_few_pairs_that_import(folders, depth, most):
    """A layer imports only layers below. Entries and `setup` count as folders."""
    files = {source.module: source for source in sources(*folders) if source.module.count(".") >= depth}
    folder = {module: module.split(".")[depth] for module in files}
    pairs = {(folder[module], folder[used]) for module, used in imports_among(files)}
    below = {user: {used for owner, used in pairs if owner == user != used} for user in folder.values()}
    sorter, layers = graphlib.TopologicalSorter(below), 0
    sorter.prepare()
    while sorter.is_active():
        sorter.done(*sorter.get_ready())
        layers += 1
    counts = len(below), layers, sum(map(len, below.values()))
    advice = "a new pair of folders often means that a function lies in the wrong one; move it, or merge two folders"
    assert all(map(int.__le__, counts, most)), f"{counts} folders, layers and pairs, at most {most}: {advice}"


def test_the_schema_is_read_by_few():
    """Datasets, networks and evaluations take explicit arguments."""
    rooms = MAY_IMPORT.keys() - {"scripts"}
    readers = {s.name for s in sources(*rooms) if any(f"{n}.".startswith("engine.schema.") for n in s.imported)}
    wrong = [name for name in readers if name.split("/")[:2] not in [["engine", r] for r in ("schema", *KNOWS_SCHEMA)]]
    assert not wrong, f"{wrong}: take explicit arguments, which engine/assemble or engine/training hands over"


# Pronouns and participles, which say how something came instead of what it is. CONTRIBUTING ("Nouns") has names.
PRONOUNS = frozenset(
    "about at both each every found given held here it its known made now of one own owns said such taken "
    "asked told their theirs them there these those what who whom whose others".split()
)


def defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields (name, line) of all variables, parameters, fields, methods, functions and classes that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def test_names_are_nouns():
    pronouns = [
        f"{source.name}:{line} {name}"
        for source in sources("", *MAY_IMPORT)
        for name, line in defined_names(ast.parse(source.path.read_text()))
        if name.strip("_") in PRONOUNS
    ]
    assert len(PRONOUNS) <= 40 and not pronouns, f"{pronouns}: name what it is, as in CONTRIBUTING.md, 'Nouns'"
