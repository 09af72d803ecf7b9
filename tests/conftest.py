"""Settings for the whole test run."""

import atexit
import ctypes
import gc
import os
import random
import signal
import sys
import warnings
from collections import defaultdict
from pathlib import Path

# The machine's environment does not decide a test. Threads: two test processes share two cores, where second OpenMP
# threads would only wait for each other.
os.environ |= {"OMP_NUM_THREADS": "1", "TERM": "xterm"}
for name in ("FORCE_COLOR", "NO_COLOR", "HYDRA_FULL_ERROR", "GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
    os.environ.pop(name, None)
# Many containers set it: then each of a run's processes would compile every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from datasets.synthetic import write_streets  # noqa: E402
from engine.process import stopping  # noqa: E402
from engine.process.allocations import keep_freed_memory  # noqa: E402
from engine.records.provenance import provenance  # noqa: E402
from keepless import KeeplessWarning  # noqa: E402
from tests.ranks import Ranks  # noqa: E402
from tests.runs import hasten  # noqa: E402

# Without xdist, pytest has imported torch before this file, for a filter of warnings in pyproject.toml.
torch.set_num_threads(1)

settings.register_profile("same", derandomize=True, database=None, deadline=None)  # examples in every run
settings.load_profile("same")

# A shell starts background processes with SIGINT ignored, and whatever they start ignores it too.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Decides which part of the suite `make test` runs: the commit, or any word. xdist's workers inherit it.
os.environ.setdefault("DRAW", (provenance()["commit"] or "no commit").removesuffix("-dirty"))
DRAWN_OF_A_TABLE = 0.2  # of its parameters; at least one
DRAWN_SLOW = 4  # tests of at most half a minute of processor time each, most of a few seconds: less than 60 in all


def pytest_report_header() -> str:
    part = f"a part of all tables and {DRAWN_SLOW} slow tests are drawn"
    return f"{part}; to draw the same again: DRAW={os.environ['DRAW']}"


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `drawn` what `make test` runs: a part of each table, all of other tests, and a few slow ones.

    Where all tests lie in one file, tables are whole, and no slow ones are drawn.
    """
    groups = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if not any(map(item.get_closest_marker, ("gpu", "peer"))):
            groups[item.nodeid.partition("[")[0]].append(item)
    whole = len({item.path for item in items}) == 1
    slow = []
    for name, group in groups.items():
        draw = random.Random(f"{os.environ['DRAW']} {name}")
        marks = {item: item.get_closest_marker("slow") for item in group}
        rare = [item for item, mark in marks.items() if mark is not None and not mark.args]
        if rare:
            slow.append(draw.choice(rare))
        group = [item for item in group if not item.get_closest_marker("slow")]
        if group[:1] and group[0].get_closest_marker("table") and not whole:
            group = draw.sample(group, max(1, round(DRAWN_OF_A_TABLE * len(group))))
        for item in group:
            item.add_marker("drawn")
    if not whole:
        for item in random.Random(os.environ["DRAW"]).sample(slow, min(DRAWN_SLOW, len(slow))):
            item.add_marker("drawn")


def pytest_collection_finish() -> None:
    """Leave PyTorch's half a million objects out of all later garbage collections, and out of pages copied by forks."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def private_cache(tmp_path_factory):
    """Keep drawn pictures and remembered checks out of the user's cache."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # one folder for all workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
        yield


@pytest.fixture(autouse=True)
def without_tf32():
    """A training may have allowed TF32 in this process; tests that want it switch it on."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(autouse=True)
def not_ended():
    """A command that ends ignores signals, and ends its process: here pytest's."""
    before = {number: signal.getsignal(number) for number in stopping.ONE_REQUEST_SECONDS}
    yield
    stopping.restore_handlers(before)
    atexit.unregister(stopping._end_within_seconds)


@pytest.fixture(autouse=True)
def unexpected_warnings():
    """Fail a test at its end if keepless has warned, unless the test caught the warning or ignores it.

    They are recorded, and not raised: an error in a hook would change the step.
    """
    texts: list[str] = []
    show = warnings.showwarning

    def record(message, category, filename, lineno, file=None, line=None):
        if issubclass(category, KeeplessWarning):
            texts.append(f"{filename}:{lineno}: {message}")
        show(message, category, filename, lineno, file, line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "showwarning", record)
        yield
    if texts:
        pytest.fail("keepless has warned, and the test did not expect it:\n" + "\n".join(texts), pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def hastened():
    with pytest.MonkeyPatch.context() as patch:
        hasten(patch)
        yield


@pytest.fixture(autouse=True, scope="module")
def freed_memory():
    """Reused within a module, as in runs, since new pages are slow; returned to the system at the module's end."""
    kept = keep_freed_memory()
    yield
    gc.collect()
    if kept:  # glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    """Processes that run functions of a module together: its WORLD_SIZE."""
    started = Ranks(request.module.WORLD_SIZE, tmp_path_factory.mktemp("ranks"))
    yield started
    started.stop()


@pytest.fixture(scope="session")
def drawn(tmp_path_factory) -> Path:
    """Drawn streets in the layout of Cityscapes: 12 to train on, 3 to evaluate."""
    folder = tmp_path_factory.mktemp("drawn") / "streets"
    write_streets(folder, {"train": 12, "val": 3}, seed=0)
    return folder


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
