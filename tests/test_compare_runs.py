"""The report of finished runs: numbers from their files, and no paths of their machine."""

import json
import re
import shlex

import pytest
from omegaconf import OmegaConf

import train_imagenet
from datasets import synthetic
from eval import evaluate
from scripts.compare_runs import Comparison, compare
from tests.runs import SHORT, SHORT_SHAPES, composed
from train_seg import train


def test_report_is_made_from_the_runs_and_can_be_made_again(tmp_path):
    root = tmp_path / "my streets"
    synthetic(root, "train")
    results = {}
    for name in ("std", "inplace"):
        run_dir = tmp_path / name / "seed0"  # as scripts.run_table calls them
        overrides = (f"run_dir={run_dir}", f"data.root={root}", *SHORT, "trainer.steps=2", f"norm={name}")
        results[name] = train(
            composed("train_seg", *overrides), command=shlex.join(["python", "train_seg.py", *overrides])
        )
    pages = []
    for folders in (tmp_path.glob("*/seed0"), (tmp_path / "report").iterdir()):
        runs = sorted(map(str, folders), reverse=True)
        values = OmegaConf.structured(Comparison(runs=runs, out=str(tmp_path / "report")))
        pages.append(compare(values).read_text())
    assert pages[0] == pages[1]
    assert str(tmp_path) not in pages[0] and " data.root=DIR " in pages[0] and "run_dir" not in pages[0]
    file = tmp_path / "report" / "std" / "config.yaml"
    config = file.read_text()
    assert re.search(r"(?m)^# 1 x cpu$", config)
    file.write_text(config.replace("# 1 x", "# 2 x"))
    assert "\ntorchrun --nproc-per-node 2 train_seg.py data.root=DIR" in compare(values).read_text()
    expected = " | ".join(f"**{100 * result['miou']:.2f}**" for result in results.values())
    assert f"| **mIoU %, last checkpoint** | {expected} |" in pages[0]
    assert (tmp_path / "report.png").stat().st_size > 10_000
    for file in (tmp_path / "report").rglob("*.*"):
        assert str(root) not in file.read_text(), file
    kept = json.loads((tmp_path / "report" / "std" / "results.json").read_text())
    assert kept["confusion_matrix"] == results["std"]["confusion_matrix"]


def test_a_folder_without_results_is_named(tmp_path):
    values = OmegaConf.structured(Comparison(runs=[str(tmp_path)], out=str(tmp_path / "report")))
    with pytest.raises(ValueError, match="has no results.json"):
        compare(values)


def test_classifications_are_compared_with_their_other_evaluations(tmp_path):
    runs, results = [], []
    for norm in ("inplace", "std"):
        folder = tmp_path / norm
        options = (*SHORT_SHAPES, "trainer.steps=2", f"norm={norm}", "norm.backend=eager", f"run_dir={folder}")
        results.append(train_imagenet.train(composed("train_imagenet", *options)))
        evaluate(composed("eval", f"checkpoint={folder / 'checkpoints' / 'last.pt'}", "activation=relu", "workers=0"))
        runs.append(str(folder))
    text = compare(OmegaConf.structured(Comparison(runs=runs, out=str(tmp_path / "report")))).read_text()
    expected = " | ".join(f"**{100 * result['top1']:.2f}**" for result in results)
    assert f"| **top-1 %, last checkpoint** | {expected} |" in text and "| checkerboard |" in text
    swapped = json.loads((tmp_path / "report" / "std" / "results_relu.json").read_text())
    (row,) = [line for line in text.splitlines() if line.startswith("| top-1 %, eval.py: relu |")]
    assert row.endswith(f" {100 * swapped['top1']:.2f} |") and str(tmp_path) not in json.dumps(swapped)

    train(composed("train_seg", f"run_dir={tmp_path / 'other'}", *SHORT, "trainer.steps=1"))
    values = OmegaConf.structured(Comparison(runs=[runs[0], str(tmp_path / "other")], out=str(tmp_path / "mixed")))
    with pytest.raises(ValueError, match="expected runs of one task"):
        compare(values)


def test_results_of_an_unknown_task_are_named(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"dataset": "words", "perplexity": 1.0}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "val", "step": 1, "perplexity": 1.0}) + "\n")
    (tmp_path / "config.yaml").write_text("# python train_words.py\ndata:\n  name: words\n")
    values = OmegaConf.structured(Comparison(runs=[str(tmp_path)], out=str(tmp_path / "report")))
    with pytest.raises(ValueError, match=f"^runs: {tmp_path} has no miou or top1 in its results.json"):
        compare(values)


def test_a_run_that_was_cut_off_is_refused(tmp_path):
    train(composed("train_seg", f"run_dir={tmp_path / 'run'}", *SHORT, "trainer.steps=2"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    values = OmegaConf.structured(Comparison(runs=[str(tmp_path / "run")], out=str(tmp_path / "report")))
    with pytest.raises(ValueError, match="a run that has ended"):
        compare(values)
