"""Benchmarks' records, and copies of committed runs, in tests."""

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks import frame
from engine.configuration.command_line import checked

CIFAR = frame.RESULTS / "cifar" / "norms"


def copied(folder: Path, score: float = 0.9, **keys: object) -> Path:
    """A run of CIFAR-10 with another score and other keys, such as norm={"name": "std"}."""
    shutil.copytree(CIFAR / "inplace", folder)
    config = json.loads((folder / "results.json").read_text())["config"]
    plain = {name: {**config[name], **value} if isinstance(value, dict) else value for name, value in keys.items()}
    *records, last = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*records, json.dumps({**json.loads(last), "top1": score})]))
    return changed(folder, lambda results: results.update(config=config | plain, top1=score))


def changed(run: Path, change: Callable[[dict], object]) -> Path:
    """The run, with a change of its results."""
    results = json.loads((run / "results.json").read_text())
    change(results)
    (run / "results.json").write_text(json.dumps(results))
    return run


def measured(name: str, folder: Path, *overrides: str) -> tuple[dict, str]:
    """The call that `python -m benchmarks.NAME OVERRIDES` records, and its tables.

    They are made from the record alone, and neither says where the files lie.
    """
    out, run = folder / "record.json", importlib.import_module(f"benchmarks.{name}").run
    text = run(checked(name, f"out={out}", *overrides))
    assert run(checked(name, f"out={out}", *overrides)) == text  # measures nothing again
    assert str(folder) not in text + out.read_text()
    (call,) = json.loads(out.read_text())["calls"]
    return call, text
