"""A benchmark's record in tests."""

import json
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from engine.configuration.command_line import composed


def measured(name: str, run: Callable[[DictConfig], Path], folder: Path, *overrides: str) -> tuple[dict, str]:
    """The record of `python -m scripts.NAME OVERRIDES` and its page.

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
