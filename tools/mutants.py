"""Change one operator, number or statement of the code at a time, and see whether the tests notice:

    make mutants MUTANTS="count=50 room=keepless/norms tests=tests/keepless"    # or [seed=0] [seconds=40]

First the tests run once, and coverage notes which lines each test executes. Then each mutant runs the tests that
execute its line. It starts with the fastest and stops when one fails, or after the given seconds. A mutant runs in a
forked child of this process, where the code of loaded functions is exchanged, so nothing is imported again. The
mutants that survive are printed for a person to judge. Tests that start other processes (torchrun, commands) do not
see a mutant, and code outside of functions is not changed.
Libraries were tried: mutmut rewrites every function of the repository, which tests of its structure refuse; cosmic-ray
starts all tests again for every mutant.
"""

import ast
import copy
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar

import pytest
from coverage import Coverage

REPOSITORY = Path(__file__).resolve().parent.parent
ROOMS = ("datasets", "engine", "keepless", "models", "scripts")
WORKERS = 2
SWAPPED: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
}
LEFT_OUT = {"__class__": ast.Pass, "_fields": ()}
# By the exit code of a child: 1 is Python's for an exception. One that crashed or hung was noticed, too.
RESULTS = {0: "survived", 1: "an error of this tool", 2: "not loaded", 3: "survived the tests that time allowed"}
KILLED = 4
Change = dict[str, object]  # attributes of a node
T = TypeVar("T")


class Mutant(NamedTuple):
    file: str  # from the repository's root
    line: int
    change: str  # in words
    tree: ast.Module  # of the file, with the change


def swapped(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """The changes of one node, and what each is."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        new = SWAPPED[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} -> {new.__name__}", {"ops": [new(), *node.ops[1:]]}
    elif isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in SWAPPED:
        new = SWAPPED[type(node.op)]
        if not any(isinstance(child, (ast.JoinedStr, ast.List, ast.Tuple)) for child in ast.iter_child_nodes(node)):
            yield f"{type(node.op).__name__} -> {new.__name__}", {"op": new()}
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield f"{node.value} -> {not node.value}", {"value": not node.value}
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield f"{node.value} -> {node.value + 1}", {"value": node.value + 1}
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield "the condition negated", {"test": ast.UnaryOp(ast.Not(), node.test)}
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "the statement left out", LEFT_OUT


def candidates(
    node: ast.AST, path: tuple[int, ...] = (), inside: bool = False
) -> Iterator[tuple[int, str, tuple[int, ...], Change]]:
    """Line, text, path from the tree to its node (positions among children), change: of all that can be changed in
    functions.

    Not in what is only said, checked or annotated: messages, raise, assert, decorators and default arguments.
    """
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign, ast.arguments)):
        return
    if inside and hasattr(node, "lineno"):
        for description, change in swapped(node):
            yield node.lineno, description, path, change
    inside = inside or isinstance(node, (ast.FunctionDef, ast.Lambda))
    left_out = [*getattr(node, "decorator_list", []), getattr(node, "returns", None)]
    for position, child in enumerate(ast.iter_child_nodes(node)):
        if child not in left_out:
            yield from candidates(child, (*path, position), inside)


def mutant_of(file: str, tree: ast.Module, line: int, text: str, path: tuple[int, ...], change: Change) -> Mutant:
    changed = copy.deepcopy(tree)
    node: ast.AST = changed
    for position in path:
        node = [*ast.iter_child_nodes(node)][position]
    for name, value in change.items():
        setattr(node, name, value)
    return Mutant(file, line, text, ast.fix_missing_locations(changed))


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def exchange(mutant: Mutant) -> int:
    """Give the loaded functions of a file the code of its mutant. Returns how many have other code."""
    name = str(REPOSITORY / mutant.file)
    source = compile((REPOSITORY / mutant.file).read_text(), name, "exec")
    old_codes = [*codes(source)]
    new_codes = [*codes(compile(mutant.tree, name, "exec"))]
    if len(old_codes) != len(new_codes):  # a statement with a function of its own was left out
        return 0
    new = {old: changed for old, changed in zip(old_codes, new_codes, strict=True) if old != changed}
    gc.unfreeze()
    functions = [object for object in gc.get_objects() if isinstance(object, FunctionType) and object.__code__ in new]
    for function in functions:
        if function.__code__.co_filename == name:
            function.__code__ = new[function.__code__]
    return len(functions)


class Runner:
    """A plugin of pytest: collects the tests, and runs them in children of this process."""

    def __init__(self, count: int, seed: int, room: str, seconds: float):
        self.count = count
        self.draw = random.Random(seed)
        self.room = room
        self.seconds = seconds
        self.failed: list[str] = []
        self.durations = Counter[str]()  # seconds
        self.executing: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))  # file, line: tests
        self.coverage: Coverage | None = None
        self.results = Counter[str]()
        self.survivors: list[str] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.coverage is not None:
            self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations[report.nodeid] += report.duration  # type: ignore[assignment]  # counts floats
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        began = time.perf_counter()
        self.items = {item.nodeid: item for item in session.items}
        self.folder = Path(tempfile.mkdtemp())
        for part, code in self.in_children(((part, partial(self.cover, part)) for part in range(WORKERS)), 3600):
            if code:
                raise RuntimeError(f"the tests could not be run: see {self.folder / 'output'}")
            lines, durations, failed = json.loads((self.folder / f"{part}.json").read_text())
            for file, tests_by_line in lines.items():
                for line, tests in tests_by_line.items():
                    self.executing[file][line] += filter(None, tests)
            self.durations.update(durations)
            self.failed += failed
        print(f"{len(self.durations)} tests ran in {time.perf_counter() - began:.0f} s; failed: {self.failed}")
        jobs = ((mutant, partial(self.tried, mutant, tests)) for mutant, tests in self.drawn())
        for mutant, code in self.in_children(jobs, self.seconds + 60):
            self.note(mutant, RESULTS.get(code, "killed"))
        total = sum(self.results.values()) - self.results["not loaded"]
        print(f"\n{time.perf_counter() - began:.0f} s in all; of {total} mutants", dict(self.results))
        print(*sorted(self.survivors), sep="\n")
        return True

    def drawn(self) -> Iterator[tuple[Mutant, list[str]]]:
        """Mutants of lines that tests execute, with these tests; lines that none executes only count."""
        changes: list[tuple] = []
        for room in ROOMS:
            for file in sorted((REPOSITORY / room).rglob("*.py")):
                name = str(file.relative_to(REPOSITORY))
                if name.startswith(self.room) and "triton" not in name:
                    tree = ast.parse(file.read_text())
                    changes += [(name, tree, *candidate) for candidate in candidates(tree)]
        for choice in self.draw.sample(changes, min(self.count, len(changes))):
            mutant = mutant_of(*choice)
            tests = self.executing[str(REPOSITORY / mutant.file)][str(mutant.line)]
            if tests:
                yield mutant, sorted(tests, key=self.durations.__getitem__)
            else:
                self.note(mutant, "not executed")

    def note(self, mutant: Mutant, outcome: str) -> None:
        self.results[outcome] += 1
        if outcome not in ("killed", "not loaded"):
            source = (REPOSITORY / mutant.file).read_text().splitlines()[mutant.line - 1].strip()
            self.survivors.append(f"{outcome}: {mutant.file}:{mutant.line}: {mutant.change}: {source}")

    def in_children(self, jobs: Iterable[tuple[T, Callable[[], int]]], limit: float) -> Iterator[tuple[T, int]]:
        """Run jobs in children, as many at a time as there are workers. Yields the subject of each, and its exit code.

        A child is killed after `limit` seconds.
        """
        waiting = iter(jobs)
        running: dict[Any, tuple[T, float]] = {}
        while True:
            for subject, job in islice(waiting, WORKERS - len(running)):
                child = multiprocessing.get_context("fork").Process(target=self.begin, args=(job,))
                child.start()
                running[child] = subject, time.perf_counter() + limit
            if not running:
                return
            wait([child.sentinel for child in running], timeout=1)
            for child, (subject, end) in [*running.items()]:
                if time.perf_counter() > end:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.join()
                if child.exitcode is not None:
                    del running[child]
                    yield subject, child.exitcode

    def begin(self, job: Callable[[], int]) -> None:
        """In a child: what it says goes into a file."""
        os.setsid()
        with open(self.folder / "output", "a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os._exit(job())

    def run(self, items: list[pytest.Item]) -> Iterator[None]:
        """Run tests; yields after each."""
        for item, following in zip(items, [*items[1:], None], strict=False):
            yield item.ihook.pytest_runtest_protocol(item=item, nextitem=following)

    def cover(self, part: int) -> int:
        """Run a part of the tests, file by file, and write down which lines each of them executes."""
        self.coverage = Coverage(data_file=None, source=[str(REPOSITORY / room) for room in ROOMS], config_file=False)
        files = sorted({item.path for item in self.items.values()})
        part_items = [item for item in self.items.values() if files.index(item.path) % WORKERS == part]
        self.coverage.start()
        for _ in self.run(part_items):
            pass
        self.coverage.stop()
        data = self.coverage.get_data()
        lines = {file: data.contexts_by_lineno(file) for file in data.measured_files()}
        (self.folder / f"{part}.json").write_text(json.dumps([lines, self.durations, self.failed]))
        return 0

    def tried(self, mutant: Mutant, tests: list[str]) -> int:
        """`KILLED` if a test notices the mutant; else a key of `RESULTS`."""
        failed_before = {*self.failed}
        end = time.perf_counter() + self.seconds
        if not exchange(mutant):
            return 2
        self.failed = []
        for number, _ in enumerate(self.run([self.items[test] for test in tests]), 1):
            if {*self.failed} - failed_before:
                return KILLED
            if time.perf_counter() > end and number < len(tests):
                return 3
        return 0


def main() -> None:
    options = dict(word.split("=", 1) for word in sys.argv[1:])
    count = int(options.pop("count", "200"))
    seed = int(options.pop("seed", "0"))
    runner = Runner(count, seed, options.pop("room", ""), float(options.pop("seconds", "40")))
    base = ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler", "-o", "addopts="]
    tests = [options.pop("tests", "tests"), "--import-mode=importlib", "-m", "not gpu and not slow and not peer"]
    assert not options, f"{options}: expected count, seed, room, tests and seconds"
    sys.exit(pytest.main([*base, *tests], plugins=[runner]))


if __name__ == "__main__":
    main()
