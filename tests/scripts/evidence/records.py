"""A benchmark's record in tests."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace

from omegaconf import DictConfig

from engine.configuration.command_line import composed
from scripts.evidence.methods import Measured, NetworksArguments


def measured(name: str, run: Callable[[DictConfig], Path], folder: Path, *overrides: str) -> tuple[dict, str]:
    """The record of `python -m scripts.evidence.NAME OVERRIDES` and its page.

    The page is made from the record alone, and neither says where the files lie.
    """
    out = folder / "record.json"
    page = run(composed(name, f"out={out}", *overrides))
    text = page.read_text()
    page.unlink()
    run(composed(name, f"out={out}", "measure=false"))
    assert page.read_text() == text
    assert str(folder) not in text + out.read_text()
    return json.loads(out.read_text()), text


def here(make: Callable[..., object], *arguments: object) -> AbstractContextManager:
    """`Elsewhere` without a process: tests/scripts/evidence/test_frame.py starts the processes."""
    made = make(*arguments)
    return nullcontext(SimpleNamespace(call=lambda method, *given: getattr(made, method)(*given)))


def alone(measured: Callable[..., Measured], name: str, arguments: NetworksArguments) -> Measured:
    """`methods.alone` without a process."""
    size, rounds = arguments.image_size, arguments.rounds
    return measured(name, arguments.device, arguments.images, size, rounds, arguments.compiler)
