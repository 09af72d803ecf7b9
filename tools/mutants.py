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
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

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
RESULTS = {0: "survived", 2: "not loaded", 3: "an error of this tool", 4: "survived the tests that time allowed"}
Change = Callable[[ast.AST], None]


class Mutant(NamedTuple):
    file: str  # from the repository's root
    line: int
    about: str
    tree: ast.Module  # of the file, with the change


def swapped(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """The changes of one node: what each is, and a function that makes it."""

    def put(name: str, value: object) -> Change:
        return lambda node: setattr(node, name, value)

    if isinstance(node, ast.Compare) and (new := SWAPPED.get(type(node.ops[0]))):
        yield f"{type(node.ops[0]).__name__} -> {new.__name__}", put("ops", [new(), *node.ops[1:]])
    elif isinstance(node, (ast.BoolOp, ast.BinOp)) and (new := SWAPPED.get(type(node.op))):
        if not any(isinstance(each, (ast.JoinedStr, ast.List, ast.Tuple)) for each in ast.iter_child_nodes(node)):
            yield f"{type(node.op).__name__} -> {new.__name__}", put("op", new())
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield f"{node.value} -> {not node.value}", put("value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield f"{node.value} -> {node.value + 1}", put("value", node.value + 1)
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield "the condition negated", put("test", ast.UnaryOp(ast.Not(), node.test))


def candidates(tree: ast.Module) -> Iterator[tuple[int, str, list[int], Change]]:
    """Line, change, path from the tree to its node (positions among children) of all that can be changed in functions.

    Not in what is only said, checked or annotated: messages, raise, assert, decorators and default arguments.
    """

    def walk(node: ast.AST, path: list[int], inside: bool) -> Iterator[tuple[int, str, list[int], Change]]:
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign, ast.arguments)):
            return
        if inside and hasattr(node, "lineno"):
            for about, change in swapped(node):
                yield node.lineno, about, path, change
            is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            if is_call or isinstance(node, ast.AugAssign):
                yield node.lineno, "the statement left out", path, empty
        inside = inside or isinstance(node, (ast.FunctionDef, ast.Lambda))
        decorators = getattr(node, "decorator_list", [])
        for position, child in enumerate(ast.iter_child_nodes(node)):
            if child not in decorators and child is not getattr(node, "returns", None):
                yield from walk(child, [*path, position], inside)

    yield from walk(tree, [], False)


def empty(node: ast.AST) -> None:
    """Leave out a statement."""
    node.__class__ = ast.Pass
    node._fields = ()  # type: ignore[misc]


def mutant_of(file: str, tree: ast.Module, line: int, about: str, path: list[int], change: Change) -> Mutant:
    changed: ast.AST = copy.deepcopy(tree)
    node = changed
    for position in path:
        node = [*ast.iter_child_nodes(node)][position]
    change(node)
    assert isinstance(changed, ast.Module)
    return Mutant(file, line, about, ast.fix_missing_locations(changed))


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes(each)


def exchange(mutant: Mutant) -> int:
    """Give the loaded functions of a file the code of its mutant. Returns how many have other code."""
    name = str(REPOSITORY / mutant.file)
    source = compile((REPOSITORY / mutant.file).read_text(), name, "exec")
    olds, news = [*codes(source)], [*codes(compile(mutant.tree, name, "exec"))]
    if len(olds) != len(news):  # a statement with a function of its own was left out
        return 0
    new = {old: changed for old, changed in zip(olds, news, strict=True) if old != changed}
    gc.unfreeze()
    functions = [one for one in gc.get_objects() if isinstance(one, FunctionType) and one.__code__ in new]
    for function in functions:
        if function.__code__.co_filename == name:
            function.__code__ = new[function.__code__]
    return len(functions)


class Runner:
    """A plugin of pytest: collects the tests, and runs them in children of this process."""

    def __init__(self, count: int, seed: int, room: str, seconds: float):
        self.count, self.draw, self.room, self.seconds = count, random.Random(seed), room, seconds
        self.failed: list[str] = []
        self.survivors: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        began = time.perf_counter()
        self.session, self.folder = session, Path(tempfile.mkdtemp())
        for part in range(WORKERS):
            self.in_child(lambda part=part: self.cover(part), limit=3600)  # type: ignore[misc]
        self.wait(0)
        self.executing: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.durations: dict[int, float] = {}
        for part in range(WORKERS):
            lines, durations, failed = json.loads((self.folder / f"{part}.json").read_text())
            for file, own in lines.items():
                for line, tests in own.items():
                    self.executing[file][int(line)] += tests
            self.durations |= {int(number): seconds for number, seconds in durations.items()}
            self.failed += failed
        print(f"{len(self.durations)} tests ran in {time.perf_counter() - began:.0f} s; failed: {self.failed}")
        self.results: Counter[str] = Counter()
        for mutant, tests in self.drawn():
            self.in_child(lambda mutant=mutant, tests=tests: self.tried(mutant, tests), self.seconds + 60, mutant)  # type: ignore[misc]
        self.wait(0)
        total = sum(self.results.values()) - self.results["not loaded"]
        print(f"\n{time.perf_counter() - began:.0f} s in all; of {total} mutants", dict(self.results))
        print(*sorted(self.survivors), sep="\n")
        return True

    def drawn(self) -> Iterator[tuple[Mutant, list[int]]]:
        """Mutants of lines that tests execute, with these tests; lines that none executes only count."""
        known: list[tuple] = []
        for room in ROOMS:
            for file in sorted((REPOSITORY / room).rglob("*.py")):
                name = str(file.relative_to(REPOSITORY))
                if name.startswith(self.room) and "triton" not in name:
                    tree = ast.parse(file.read_text())
                    known += [(name, tree, *candidate) for candidate in candidates(tree)]
        for each in self.draw.sample(known, min(self.count, len(known))):
            mutant = mutant_of(*each)
            if tests := self.executing[mutant.file][mutant.line]:
                yield mutant, sorted(tests, key=self.durations.__getitem__)
            else:
                self.note(mutant, "not executed")

    def note(self, mutant: Mutant, result: str) -> None:
        self.results[result] += 1
        if result not in ("killed", "not loaded"):
            source = (REPOSITORY / mutant.file).read_text().splitlines()[mutant.line - 1].strip()
            self.survivors.append(f"{result}: {mutant.file}:{mutant.line}: {mutant.about}: {source}")

    running: dict[int, tuple[float, Mutant | None]]

    def in_child(self, job: Callable[[], int], limit: float, mutant: Mutant | None = None) -> None:
        """Run a job in a child, as soon as one of the workers is free. Its exit code is the job's result."""
        self.running = getattr(self, "running", {})
        self.wait(WORKERS - 1)
        if (child := os.fork()) == 0:
            os.setsid()
            with open(self.folder / "output", "a") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            code = 3
            try:
                code = job()
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        self.running[child] = time.perf_counter() + limit, mutant

    def wait(self, most: int) -> None:
        """Until at most so many children run."""
        while len(self.running) > most:
            for child, (end, mutant) in [*self.running.items()]:
                ended, status = os.waitpid(child, os.WNOHANG)
                if not ended and time.perf_counter() > end:
                    os.killpg(child, signal.SIGKILL)
                    ended, status = os.waitpid(child, 0)
                if ended:
                    del self.running[child]
                    code = os.waitstatus_to_exitcode(status)
                    if mutant is not None:  # one that crashed or hung was noticed, too
                        self.note(mutant, RESULTS.get(code, "killed"))
                    elif code:
                        raise RuntimeError(f"the tests could not be run: see {self.folder / 'output'}")
            time.sleep(0.02)

    def run(self, numbers: list[int], until: float = float("inf")) -> Iterator[int]:
        """Run tests by number; yields each when it has ended."""
        items = [self.session.items[number] for number in numbers]
        for number, item, following in zip(numbers, items, [*items[1:], None], strict=False):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            yield number
            if time.perf_counter() > until:
                return

    def cover(self, part: int) -> int:
        """Run a part of the tests, file by file, and write down which lines each of them executes."""
        coverage = Coverage(data_file=None, source=[str(REPOSITORY / room) for room in ROOMS], config_file=False)
        files = sorted({item.path for item in self.session.items})
        mine = [number for number, item in enumerate(self.session.items) if files.index(item.path) % WORKERS == part]
        durations: dict[int, float] = {}
        coverage.start()
        coverage.switch_context(str(mine[0]) if mine else "")
        began = time.perf_counter()
        for position, number in enumerate(self.run(mine)):
            durations[number] = time.perf_counter() - began
            coverage.switch_context(str(mine[position + 1]) if position + 1 < len(mine) else "")
            began = time.perf_counter()
        coverage.stop()
        data, lines = coverage.get_data(), {}
        for file in data.measured_files():
            name = str(Path(file).relative_to(REPOSITORY))
            found = data.contexts_by_lineno(file)
            lines[name] = {line: [int(one) for one in tests if one] for line, tests in found.items()}
        (self.folder / f"{part}.json").write_text(json.dumps([lines, durations, self.failed]))
        return 0

    def tried(self, mutant: Mutant, tests: list[int]) -> int:
        """1 if a test notices the mutant; else a key of `RESULTS`."""
        broken = {*self.failed}
        self.failed = []
        if not exchange(mutant):
            return 2
        ran = 0
        for _ in self.run(tests, time.perf_counter() + self.seconds):
            ran += 1
            if {*self.failed} - broken:
                return 1
        return 0 if ran == len(tests) else 4


def main() -> None:
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    count, seed = int(given.pop("count", "200")), int(given.pop("seed", "0"))
    runner = Runner(count, seed, given.pop("room", ""), float(given.pop("seconds", "40")))
    own = ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler", "-o", "addopts="]
    tests = [given.pop("tests", "tests"), "--import-mode=importlib", "-m", "not gpu and not slow and not peer"]
    assert not given, f"{given}: expected count, seed, room, tests and seconds"
    sys.exit(pytest.main([*own, *tests], plugins=[runner]))


if __name__ == "__main__":
    main()
