"""Comparing two checkouts: every differing bit is named, and only results count. No training runs."""

import pytest

from scripts.evidence import compare_checkouts
from scripts.evidence.compare_checkouts import COMMANDS, main
from tests.runs import composed

TRAINING = """
import json, sys, torch
from pathlib import Path
from PIL import Image

run_dir = Path(next(word.partition("=")[2] for word in sys.argv if word.startswith("run_dir=")))
run_dir.mkdir()
(run_dir / "log.txt").write_text(__file__)
(run_dir / ".lock").write_text(__file__)
(run_dir / "results.json").write_text(json.dumps({"miou": 0.25, "checkpoint": str(run_dir), "environment": __file__}))
(run_dir / "metrics.jsonl").write_text(json.dumps({"loss": 0.5, "images_per_second": hash(__file__)}))
(run_dir / "config.yaml").write_text(f"# {run_dir}")
torch.save({"network": {"w": torch.zeros(2, dtype=torch.bfloat16)}, "step": 1}, run_dir / "last.pt")
Image.new("L", (2, 2), 7).save(run_dir / "picture.png", compress_level=9)
"""


EDITS = {  # of the training: (its new text, the difference that it makes, if any)
    "0.5,": ("0.50000000000000001,", None),
    "torch.zeros(2,": ("-torch.zeros(2,", "last.pt.network.w: torch.bfloat16 [2] "),
    "0.25": ("0.25000000000000006", "results.json.0.miou: 0.25 → 0.25000000000000006"),
    '"step": 1': ('"step": 1.0', "last.pt.step: 1 → 1.0"),
    "# {": ("#  {", "config.yaml.0: '# DIR/run' → '#  DIR/run'"),
    "compress_level=9": ("compress_level=0", None),
    ", 7)": (", 8)", "picture.png: "),
}


EQUAL = {before: edit for before, edit in EDITS.items() if edit[1] is None}


@pytest.mark.parametrize("edits", [pytest.param(EQUAL, marks=pytest.mark.slow), EDITS], ids=["equal", "different"])
def test_one_differing_bit_is_named(tmp_path, monkeypatch, edits):
    """Wherever the checkouts lie. -0.0 is not 0.0, and 1 is not 1.0."""
    changed = TRAINING
    for before, (after, _) in edits.items():
        assert before in changed
        changed = changed.replace(before, after)
    for name, text in (("old", TRAINING), ("new", changed)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train_seg.py").write_text(text)
    monkeypatch.setattr(compare_checkouts, "COMMANDS", ("train_seg.py run_dir={here}/run",))
    folders = [f"{name}={tmp_path / name}" for name in ("old", "new")]
    monkeypatch.setattr("sys.argv", ["", *folders, f"camvid={tmp_path}", f"out={tmp_path / 'page.md'}"])
    with pytest.raises(SystemExit) as ended:
        main()
    summary, *lines = (tmp_path / "page.md").read_text().splitlines()
    named = [name for _, name in edits.values() if name]
    assert summary.endswith(f": {len(named)} of 7 values differ.") and bool(ended.value.code) == bool(named)
    assert len(lines) == len(named) and all(any(f"- run/{name}" in line for line in lines) for name in named)


def test_its_commands_name_keys_that_exist():
    for line in COMMANDS:
        words = line.rpartition(" 2 ")[2].removeprefix("-m scripts.").format(here="DIR", camvid="DIR").split()
        composed(words[0].removesuffix(".py"), *words[1:])
