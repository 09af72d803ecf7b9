"""Comparing two checkouts: every differing bit is named, and what may differ is not. No training runs here."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch.utils.tensorboard import SummaryWriter

from scripts.evidence.compare_checkouts.__main__ import CheckoutComparison, compare
from scripts.evidence.compare_checkouts.scenarios import SCENARIOS
from scripts.evidence.compare_checkouts.values import compare_folders
from tests.git import committed
from tests.runs import composed

RESULTS = {"miou": 0.25, "confusion_matrix": [[1, 2], [3, 4]], "environment": {"commit": "old"}}
RECORDS = (
    {"kind": "train", "step": 1, "loss": 0.5, "images_per_second": 90.1, "peak_memory_mib": 700},
    {"kind": "val", "step": 1, "miou": 0.25},
)


def state(run_dir: Path) -> dict:
    return {
        "step": 1,
        "network": {"conv.weight": torch.arange(6.0).view(2, 3), "bn.steps": torch.tensor(3)},
        "ema": {"conv.weight": torch.full((2, 3), 0.1, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"momentum_buffer": torch.zeros(2, 3)}}, "param_groups": [{"lr": 0.1}]},
        "random": {"cpu": [torch.get_rng_state()], "cuda": []},
        "config": {"run_dir": str(run_dir), "optim": {"lr": 0.1}},
    }


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """Results of two equal runs, from checkouts in different folders."""
    both = tmp_path / "old-1" / "scenario", tmp_path / "new-2" / "scenario"
    for folder in both:
        run = folder / "run"
        (run / "checkpoints").mkdir(parents=True)
        values = state(run)
        torch.save(values, run / "checkpoints" / "last.pt")
        results = {**RESULTS, "checkpoint": str(run / "checkpoints" / "last.pt"), "config": values["config"]}
        (run / "results.json").write_text(json.dumps(results))
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
        (run / "config.yaml").write_text(f"# python train_seg.py run_dir={run}\n{yaml.dump(values['config'])}")
        (run / "log.txt").write_text("12:00 started")
        (folder / "prediction.png").write_bytes(b"pixels")
    return both


def different(folders: tuple[Path, Path]) -> dict[str, list[str]]:
    return {column: lines for column, (_, lines) in compare_folders(*folders).items() if lines}


def edit(file: Path, change) -> None:
    """Apply `change` to the content of a checkpoint or a JSON file."""
    values = torch.load(file) if file.suffix == ".pt" else json.loads(file.read_text())
    change(values)
    torch.save(values, file) if file.suffix == ".pt" else file.write_text(json.dumps(values))


def test_equal_results_are_equal_wherever_they_are(folders):
    """Of other machines, times and logs, too."""
    for name, edited in (
        ("results.json", lambda text: text.replace('"old"', '"new", "hardware": "another"')),
        ("metrics.jsonl", lambda text: text.replace("90.1", "3.0").replace("700", "800")),
        ("metrics.jsonl", lambda text: '{"kind": "resumed", "step": 1}\n' + text),
        ("log.txt", lambda text: text.replace("12", "13")),
    ):
        (folders[1] / "run" / name).write_text(edited((folders[1] / "run" / name).read_text()))
    edit(folders[1] / "run" / "results.json", lambda results: results.update(miou=results.pop("miou")))  # another order
    assert different(folders) == {}
    counts = {column: count for column, (count, _) in compare_folders(*folders).items()}
    assert counts["weights"] == 2 and counts["averages"] == counts["momenta"] == 1 and counts["files"] == 6
    assert counts["random states"] == 2  # the CPU's, and the empty list for CUDA


def test_one_differing_bit_is_named(folders):
    """Also of equal numbers: -0.0 is not 0.0, and tensors of different dtype or shape differ."""
    file = folders[1] / "run" / "checkpoints" / "last.pt"

    def flip_lowest_bit(tensor: torch.Tensor) -> None:
        tensor.reshape(-1).view(torch.uint8)[0] ^= 1

    for part, name, column in (
        *(("network", "conv.weight", "weights"), ("network", "bn.steps", "weights")),
        ("ema", "conv.weight", "averages"),
    ):
        edit(file, lambda values, part=part, name=name: flip_lowest_bit(values[part][name]))
        ((found, (line,)),) = different(folders).items()
        assert found == column and line.startswith(f"run/checkpoints/last.pt {part}.{name}: ")
        edit(file, lambda values, part=part, name=name: flip_lowest_bit(values[part][name]))
    edit(file, lambda values: values["optimizer"]["state"][0]["momentum_buffer"].neg_())
    assert list(different(folders)) == ["momenta"]
    edit(file, lambda values: values["optimizer"]["state"].update({0: {"momentum_buffer": torch.zeros(3, 2)}}))
    assert "[2, 3]" in different(folders)["momenta"][0] and "[3, 2]" in different(folders)["momenta"][0]
    edit(file, lambda values: values.update(step=1.0))
    assert different(folders)["rest of checkpoints"] == ["run/checkpoints/last.pt step: 1 → 1.0"]
    edit(file, lambda values: values["random"]["cpu"].append(torch.zeros(1)))
    (line,) = different(folders)["random states"]  # of one more process
    assert line.startswith("run/checkpoints/last.pt random.cpu.1: missing → ")


def test_differing_scores_metrics_keys_and_files_are_named(folders):
    run = folders[1] / "run"
    edit(run / "checkpoints" / "last.pt", lambda values: values["config"]["optim"].update(lr=0.2))
    edit(run / "results.json", lambda results: results.update(miou=float(np.nextafter(0.25, 1))))
    edit(run / "results.json", lambda results: results["confusion_matrix"][1].__setitem__(0, 5))
    edit(run / "results.json", lambda results: results["config"].update(seed=0))
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("lr: 0.1", "rate: 0.1"))
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace("0.5", "0.6").split("\n")[0] + "\n")
    (folders[1] / "prediction.png").write_bytes(b"others")
    (run / "checkpoints" / "best.pt.partial").write_bytes(b"")
    (folders[0] / "run" / "results_confusion.png").write_bytes(b"pixels")
    found = different(folders)
    files = found.pop("files")
    assert found == {
        "results.json": [
            "run/results.json.miou: 0.25 → 0.25000000000000006",
            "run/results.json.confusion_matrix.1.0: 3 → 5",
        ],
        "metrics.jsonl": [
            "run/metrics.jsonl line 1.loss: 0.5 → 0.6",
            *(f"run/metrics.jsonl line 2.{key} → missing" for key in ("kind: 'val'", "step: 1", "miou: 0.25")),
        ],
        "configuration": [
            "run/checkpoints/last.pt config.optim.lr: 0.1 → 0.2",
            "run/config.yaml.optim.lr: 0.1 → missing",
            "run/config.yaml.optim.rate: missing → 0.1",
            "run/results.json config.seed: missing → 0",
        ],
    }
    names = ["prediction.png", "run/results_confusion.png", "run/checkpoints/best.pt.partial"]
    assert [line.partition(": ")[0] for line in files] == names
    assert files[1].endswith("→ missing") and "missing →" in files[2]
    (run / "results.json").unlink()
    assert "run/results.json: 'present' → missing" in different(folders)["files"]


def test_curves_and_pictures_in_tensorboard_are_compared(folders):
    def write(folder: Path, loss: float, speed: float, colour: int) -> None:
        with SummaryWriter(folder / "run" / "tensorboard") as writer:
            writer.add_scalar("train/loss", loss, 1)
            writer.add_scalar("train/images_per_second", speed, 1)
            writer.add_image("picture", np.full((2, 2, 3), colour, np.uint8), 1, dataformats="HWC")

    write(folders[0], 0.5, 90, 7)
    write(folders[1], 0.5, 80, 7)
    assert different(folders) == {}
    write(folders[1], 0.6, 80, 8)
    names = {line.partition(": ")[0] for line in different(folders)["tensorboard"]}
    assert names == {f"run/tensorboard.{tag}.1.{part}" for tag in ("train/loss", "picture") for part in (0, 1)}


FAKE_TRAINING = """
import json, sys
from pathlib import Path

folder = Path(next(word.partition("=")[2] for word in sys.argv if word.startswith("run_dir=")))
folder.mkdir()
(folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": LOSS}))
with open(Path(__file__).with_name("times_run"), "a") as file:
    file.write("+")
"""


@pytest.fixture
def checkouts(tmp_path) -> CheckoutComparison:
    """Two clean git checkouts whose training writes a loss and nothing else, and a comparison of them."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train_seg.py").write_text(FAKE_TRAINING.replace("LOSS", "0.5"))
        committed(tmp_path / name)
    return CheckoutComparison(
        old=str(tmp_path / "old"),
        new=str(tmp_path / "new"),
        camvid=str(tmp_path),
        out=str(tmp_path / "page.md"),
        only=["float32"],
        work=str(tmp_path / "work"),
    )


def compared(comparison: CheckoutComparison) -> tuple[bool, str]:
    return compare(OmegaConf.structured(comparison)), Path(comparison.out).read_text()


def test_the_page_names_what_differs(checkouts):
    equal, page = compared(checkouts)
    assert equal and page.endswith("All 3 values are equal to the bit.\n")
    (Path(checkouts.new) / "train_seg.py").write_text(FAKE_TRAINING.replace("LOSS", "0.6"))
    equal, page = compared(checkouts)
    assert not equal and page.endswith("1 of 3 values differ.\n") and "with uncommitted changes" in page
    assert "**1 of 2 differ**: run/metrics.jsonl line 1.loss |" in page
    assert "- run/metrics.jsonl line 1.loss: 0.5 → 0.6\n" in page


def test_results_of_a_clean_checkout_are_used_again(checkouts):
    def times_run() -> list[int]:
        return [len((Path(folder) / "times_run").read_text()) for folder in (checkouts.old, checkouts.new)]

    compared(checkouts)
    assert times_run() == [1, 1]
    compared(checkouts)
    assert times_run() == [1, 1]
    (Path(checkouts.new) / "train_seg.py").write_text(FAKE_TRAINING.replace("LOSS", "0.5 "))
    compared(checkouts)
    compared(checkouts)
    assert times_run() == [1, 3]


def test_a_command_that_fails_in_both_is_no_equality(checkouts):
    """Also one that ends before it is stopped."""
    for scenario, training, failure in (
        ("stopped", FAKE_TRAINING.replace("LOSS", "0.5"), "exit status 0, not 75"),
        ("float32", "raise SystemExit(3)", "exit status 3, not 0"),
    ):
        checkouts.only = [scenario]
        for folder in (checkouts.old, checkouts.new):
            (Path(folder) / "train_seg.py").write_text(training)
        equal, page = compared(checkouts)
        assert not equal and f"old failed: {failure}" in page


def test_unknown_scenarios_and_folders_are_refused(checkouts, tmp_path):
    checkouts.only = ["everything"]
    with pytest.raises(ValueError, match="only=everything: expected some of float32, "):
        compared(checkouts)
    checkouts.only, checkouts.new = [], str(tmp_path)
    with pytest.raises(ValueError, match="holds no train_seg.py"):
        compared(checkouts)


def test_scenarios_name_keys_that_exist():
    for line in {command.line for commands in SCENARIOS.values() for command in commands}:
        words = line.removeprefix("-m scripts.").format(here="DIR", camvid="DIR").split()
        composed(words[0].removesuffix(".py"), *words[1:])
