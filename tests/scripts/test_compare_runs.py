"""The report of finished runs: numbers from their files, and no paths of their machine.

Reports of whole trainings are in docs/results, where tests/test_docs.py makes them again.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from datasets import synthetic
from eval import evaluate
from scripts.compare_runs import Comparison, Run, compare
from tests.runs import REPOSITORY, SHORT, composed
from train_seg import train

CIFAR = REPOSITORY / "docs" / "results" / "cifar10"


def report(folder: Path, *runs: Path) -> str:
    """The report on runs, written to `folder`."""
    return compare(OmegaConf.structured(Comparison(runs=list(map(str, runs)), out=str(folder)))).read_text()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two steps, evaluated again in another way, in a folder of a name with a space."""
    folder = tmp_path_factory.mktemp("runs")
    root, run_dir = folder / "my streets", folder / "std" / "seed0"  # as scripts.run_table calls it
    synthetic(root, "train")
    overrides = (f"run_dir={run_dir}", f"data.root={root}", *SHORT, "trainer.steps=2", "norm=std")
    train(composed("train_seg", *overrides), command=shlex.join(["python", "train_seg.py", *overrides]))
    last = run_dir / "checkpoints" / "last.pt"
    evaluate(composed("eval", f"checkpoint={last}", "tta.scales=[0.25]", "workers=0", "device=cpu"))
    return run_dir


def test_report_is_made_from_the_runs_and_can_be_made_again(finished, tmp_path):
    root = finished.parents[1]
    other = shutil.copytree(finished, tmp_path / "inplace" / "seed0", ignore=shutil.ignore_patterns("checkpoints"))
    page = report(tmp_path / "report", finished, other)
    kept = [tmp_path / "report" / name for name in ("std", "inplace")]
    assert report(tmp_path / "report", *kept) == page
    assert str(root) not in page and " data.root=DIR " in page and "run_dir" not in page
    assert "\n|  | std | inplace |\n" in page
    files = list((tmp_path / "report").rglob("*.*"))
    assert len(files) == 2 * 4 and all(str(root) not in file.read_text() for file in files)
    assert (tmp_path / "report.png").stat().st_size > 10_000
    results, (smaller,) = (json.loads((finished / "results.json").read_text()), [*finished.glob("results_*.json")])
    score = f"{100 * results['miou']:.2f}"
    assert f"| **mIoU %, last checkpoint** | **{score}** | **{score}** |" in page
    again = f"{100 * json.loads(smaller.read_text())['miou']:.2f}"
    assert re.search(rf"\| mIoU %, eval.py: .* \| {again} \| {again} \|", page)
    assert json.loads((kept[0] / "results.json").read_text())["confusion_matrix"] == results["confusion_matrix"]
    file = kept[0] / "config.yaml"
    config = file.read_text()
    assert re.search(r"(?m)^# 1 x cpu$", config)
    file.write_text(config.replace("# 1 x", "# 2 x"))
    assert "\ntorchrun --nproc-per-node 2 train_seg.py data.root=DIR" in report(tmp_path / "report", *kept)


def test_the_speed_is_the_median_also_of_an_even_number_of_values():
    run = Run(CIFAR / "std")
    run.records = [{"kind": "train", "step": step, "images_per_second": 2.0**step} for step in range(4)]
    assert run.speed() == 3.0


def test_what_cannot_be_compared_is_named(finished, tmp_path):
    with pytest.raises(ValueError, match="has no results.json"):
        report(tmp_path / "report", tmp_path)
    with pytest.raises(ValueError, match="expected runs of one task"):
        report(tmp_path / "report", finished, CIFAR / "std")
    cut_off = shutil.copytree(finished, tmp_path / "cut off", ignore=shutil.ignore_patterns("checkpoints"))
    records = (cut_off / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut_off / "metrics.jsonl").write_text("".join(records[:-1]))
    with pytest.raises(ValueError, match="a run that has ended"):
        report(tmp_path / "report", cut_off)
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "results.json").write_text(json.dumps({"dataset": "words", "perplexity": 1.0}))
    (unknown / "metrics.jsonl").write_text(json.dumps({"kind": "val", "step": 1, "perplexity": 1.0}) + "\n")
    (unknown / "config.yaml").write_text("# python train_words.py\ndata:\n  name: words\n")
    with pytest.raises(ValueError, match=f"^runs: {unknown} has no miou or top1 in its results.json"):
        report(tmp_path / "report", unknown)
