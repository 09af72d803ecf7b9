"""The report of finished runs: numbers from their files, and no paths of their machine.

Reports of whole trainings are in docs/results, where tests/test_docs.py makes them again.
"""

import json
import re
import shlex
import shutil
import statistics
from functools import partial
from pathlib import Path

import pytest

from datasets.synthetic import write_streets
from engine.schema.keys import complete_and_check
from eval import evaluate
from scripts.compare_runs import Comparison, Group, compare
from scripts.reports.markdown import unfolded
from scripts.reports.runs import Run, find_runs
from tests import trees
from tests.benchmarks.records import CIFAR, changed, copied
from tests.runs import SHORT, checked
from train_seg import train


def report(folder: Path, *runs: Path, picture: bool = False) -> str:
    """The report on runs, written to `folder`; its picture takes longer than all else."""
    with pytest.MonkeyPatch.context() as patch:
        if not picture:
            patch.setattr("scripts.compare_runs.curves", lambda groups: None)
            patch.setattr("scripts.compare_runs.charts.save", lambda figure, file: None)
        return compare(Comparison(runs=list(map(str, runs)), out=str(folder))).read_text()


def columns(page: str) -> list[str]:
    return re.search(r"(?m)^\|  \| (.*) \|$", page)[1].split(" | ")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two steps, evaluated again in another way, in a folder of a name with a space."""
    folder = tmp_path_factory.mktemp("runs")
    root, run_dir = folder / "my streets", folder / "std" / "seed0"  # as scripts.run_table calls it
    write_streets(root, {"train": 4, "val": 2}, seed=0)
    data = ("data=cityscapes", f"data.root={root}")
    overrides = (f"run_dir={run_dir}", *data, *SHORT, "trainer.steps=2", "norm=std")
    train(checked("train_seg", *overrides), command=shlex.join(["python", f"{root}/train_seg.py", *overrides]))
    last = run_dir / "checkpoints" / "last.pt"
    evaluate(checked("eval", f"checkpoint={last}", "tta.scales=[0.25]", "workers=0", "device=cpu"))
    return run_dir


def test_report_is_made_from_the_runs_and_can_be_made_again(finished, tmp_path):
    root = finished.parents[1]
    second_run = shutil.copytree(finished, tmp_path / "inplace" / "seed0", ignore=shutil.ignore_patterns("checkpoints"))
    # As of a row that starts from a trained body, and of an evaluation on another device.
    changed(second_run, lambda results: results["config"]["init"].update(weights=str(root / "net.pt")))
    changed(second_run, lambda results: results.update(miou=results["miou"] + 1e-6))
    config = (second_run / "config.yaml").read_text().replace("  weights: null", f"  weights: {root}/net.pt")
    (second_run / "config.yaml").write_text(config.replace(" norm=", f" init.weights={root}/net.pt norm=", 1))
    page = report(tmp_path / "report", finished, second_run, picture=True)
    kept = [tmp_path / "report" / name for name in ("std", "inplace")]
    assert report(tmp_path / "report", *kept) == page
    assert str(root) not in page and " data.root=DIR " in page and "run_dir" not in page
    assert columns(page) == ["std", "inplace"]  # a second run of a configuration and a seed has its own column
    files = list((tmp_path / "report").rglob("*.*"))
    assert len(files) == 2 * 4 and all(str(root) not in file.read_text() for file in files)
    assert (tmp_path / "report.png").stat().st_size > 5_000
    results, (smaller,) = (json.loads((finished / "results.json").read_text()), [*finished.glob("results_*.json")])
    score = f"{100 * results['miou']:.2f}"
    assert f"| **mIoU %, last checkpoint** | **{score}** | **{score}** |" in page
    again = f"{100 * json.loads(smaller.read_text())['miou']:.2f}"
    assert re.search(rf"\| mIoU %, eval.py: .* \| {again} \| {again} \|", page)
    assert json.loads((kept[0] / "results.json").read_text())["confusion_matrix"] == results["confusion_matrix"]
    config = (kept[0] / "config.yaml").read_text()
    assert "\n# 1 x cpu\n" in config
    (kept[0] / "config.yaml").write_text(config.replace("# 1 x", "# 2 x"))
    page = report(tmp_path / "report", *kept)
    assert "\ntorchrun --nproc-per-node 2 train_seg.py data=cityscapes data.root=DIR" in page


def test_seeds_share_a_column_named_by_their_folders(tmp_path):
    """Folders are named by a sweep, or by dates. Runs that have not ended are listed; columns are sorted by number."""
    folder, scores = tmp_path / "runs", {}
    for number, (lr, seed) in enumerate(((0.25, 0), (0.25, 1), (0.5, 1), (0.5, 0), (0.5, 2))):
        scores[lr, seed] = score = 0.8 + number**2 / 100
        name = f"optim.lr={lr},seed={seed}" if lr == 0.25 else f"optim.lr=0.5/2026-11-22_17-00-{number:02d}"
        copied(folder / name, score, optim={"lr": lr}, seed=seed, run_dir="no copy")
    (folder / "2026-11-22_18-00-00").mkdir()
    (folder / "2026-11-22_18-00-00" / "config.yaml").touch()
    (folder / "2026-11-22_18-00-00" / "metrics.jsonl").write_text('{"kind": "train", "step": 40, "loss": 1.0}\n')
    page = report(folder / "report", folder)
    assert columns(page) == ["optim.lr=0.25", "optim.lr=0.5"]
    cells = []
    for lr in (0.25, 0.5):
        percentages = [100 * score for (rate, _), score in scores.items() if rate == lr]
        cells.append(f"{statistics.mean(percentages):.2f} ± {statistics.stdev(percentages):.2f}")
    assert f"| **top-1 %, last checkpoint** | **{cells[0]}** | **{cells[1]}** |" in page
    assert "| seeds | 2 (0, 1) | 3 (1, 0, 2) |" in page
    assert "- runs/2026-11-22_18-00-00: it has not ended (step 40)\n" in page
    kept = sorted(path.name for path in (folder / "report").iterdir())
    assert kept == [f"optim.lr={lr},seed={seed}" for lr, seed in sorted(scores)]
    command = next(line for line in unfolded(page).splitlines() if "compare_runs" in line)
    assert sorted(checked("compare_runs", *shlex.split(command)[3:]).runs) == [f"OUT/{name}" for name in kept]
    assert report(folder / "report", folder) == page  # the copies are below the same folder
    again = report(tmp_path / "again", folder / "report").replace("again.png", "report.png")
    assert columns(again) == columns(page) and cells[1] in again  # seeds are in the order of their folders' names


def test_a_report_replaces_only_reports(tmp_path):
    run, second_run = copied(tmp_path / "mine"), copied(tmp_path / "out" / "mine", run_dir="somewhere")
    before = trees.contents(tmp_path)
    with pytest.raises(ValueError, match=f"^out={tmp_path}/out: {second_run} holds no copy of a run"):
        report(tmp_path / "out", run)
    with pytest.raises(ValueError, match=f"^out={tmp_path}/out: the copies .*: give out={tmp_path}/out/comparison$"):
        report(tmp_path / "out", second_run)
    for name in ("b.md", "c.png"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ValueError, match=f"^out={tmp_path}/{name} was not written by this command"):
            report(tmp_path / name[0], run)
        (tmp_path / name).unlink()
    assert trees.contents(tmp_path) == before
    for _ in range(2):
        report(tmp_path / "new", run)


def test_columns_keep_the_names_that_somebody_gave(tmp_path):
    runs = [copied(tmp_path / name, seed=seed) for seed, name in enumerate(("mine_seed0", "mine_seed1"))]
    second_run = copied(tmp_path / "its", optim={"lr": 0.25})
    assert columns(report(tmp_path / "report", *runs, second_run)) == ["mine", "its"]
    tables = [copied(tmp_path / name / f"seed{seed}", seed=seed) for name in ("a", "b") for seed in (0, 1)]
    for path in tables[2:]:
        changed(path, lambda results: results["config"]["norm"].update(eps=0.5))
    assert columns(report(tmp_path / "tables", *tables)) == ["a", "b"]
    names = sorted(path.name for path in (tmp_path / "tables").iterdir())
    assert names == ["a,seed=0", "a,seed=1", "b,seed=0", "b,seed=1"]
    seeds = [copied(tmp_path / "seeds" / f"other.seed={seed}", seed=seed) for seed in (0, 1)]
    assert columns(report(tmp_path / "one", *seeds)) == ["other.seed=0"]  # one configuration of two seeds
    ways = [copied(tmp_path / way / "same", trainer={"recompute": way}) for way in ("blocks", "activations")]
    assert columns(report(tmp_path / "places", *ways)) == ["blocks/same", "activations/same"]


def of_fold(run: Path, fold: int | None, images: int, miou: float, seed: int = 0) -> Path:
    changed(run, lambda results: results["config"]["data"].update(name="folder", fold=fold, palettes="equal"))
    changed(run, lambda results: results["config"].update(seed=seed, run_dir="no copy"))
    records = run / "metrics.jsonl"
    *lines, last = records.read_text().splitlines()
    records.write_text("\n".join([*lines, json.dumps({**json.loads(last), "miou": miou})]))
    return changed(run, lambda results: results.update(images=images, miou=miou))


def test_folds_share_a_column_whatever_their_seeds_and_numbers_of_images(finished, tmp_path):
    """A run on all images is none of them, nor is a second one of the same fold and seed."""
    folds = tmp_path / "sweep"
    for fold in range(3):
        of_fold(shutil.copytree(finished, folds / f"data.fold={fold}"), fold, 12 - fold, 0.5 + fold / 10)
    whole = of_fold(shutil.copytree(finished, tmp_path / "whole"), None, 12, 0.5)
    page = report(tmp_path / "report", folds, whole)
    assert columns(page) == ["sweep", "whole"] and "Means ± standard deviations over folds." in page
    assert "| **mIoU %, last checkpoint** | **60.00 ± 10.00** | **50.00** |" in page
    assert "| folds | 3 (0, 1, 2) | – |" in page and "| images evaluated | 10 – 12 | 12 |" in page
    assert columns(report(tmp_path / "again", tmp_path / "report"))[1:] == ["whole"]  # from the copies
    again = of_fold(shutil.copytree(finished, tmp_path / "again" / "fold2"), 2, 10, 0.7, seed=0)
    assert columns(report(tmp_path / "two", folds, again)) == ["sweep", "again"]
    of_fold(again, 2, 10, 0.7, seed=1)
    page = report(tmp_path / "both", folds, again)
    assert columns(page) == ["sweep"] and "over folds and seeds." in page and "| seeds | 2 (0, 1) |" in page


def test_what_a_run_lacks_or_has_twice_is_said():
    """A class that does not occur has no score, an even number of speeds a median."""
    run = Run(CIFAR / "std")
    run.results["accuracy"] = {"cat": 0.5, "emu": None}
    assert Group("", [run]).cell("accuracy", "emu") == "–"
    speeds = [{"step": step, "images_per_second": 2.0**step, "peak_memory_mib": 1} for step in range(4)]
    run.records = [{"kind": "train", **record} for record in speeds]
    images = run.typed.data.crops_per_minibatch * (1 / 2 + 1 / 4 + 1 / 8)
    assert run._training_facts() == {"images_per_second": 3.0, "minutes": images / 60, "peak_memory_mib": 1}


def test_runs_are_found_in_the_order_of_their_numbers(tmp_path):
    for number, lr in enumerate(("10", "9", "0.05", "1e-3")):
        copied(tmp_path / f"optim.lr={lr}", score=number / 10)
    runs, _ = find_runs([tmp_path])
    assert [run.name for run in runs] == [f"optim.lr={lr}" for lr in ("1e-3", "0.05", "9", "10")]


def test_what_cannot_be_compared_is_named(finished, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="runs: .*empty"):
        report(tmp_path / "report", tmp_path / "empty")
    with pytest.raises(ValueError, match="expected runs of one task, found .*, scored by mIoU and .*, scored by top-1"):
        report(tmp_path / "report", finished, CIFAR / "std")
    with pytest.raises(ValueError, match=r"runs=5: expected a name or a list of different names, such as \[A,B\]"):
        complete_and_check(Comparison(runs=5, out="a"))


def without_last_record(run: Path) -> None:
    records = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(records[:-1]))


CRAFTED = {
    "no last record": without_last_record,
    "other scores": partial(changed, change=lambda results: results.update(perplexity=results.pop("top1"))),
    "configuration of a list": partial(changed, change=lambda results: results.update(config=[])),
    "list of results": lambda run: (run / "results.json").write_text("[1]"),
}


@pytest.mark.parametrize("crafted", CRAFTED)
def test_a_crafted_run_is_left_out_in_a_line(tmp_path, crafted):
    CRAFTED[crafted](copied(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"no run has ended \(.*/run: it cannot be read \(") as refused:
        report(tmp_path / "report", tmp_path / "run")
    assert "\n" not in str(refused.value)


def test_names_that_are_not_utf8_are_written_as_escapes(tmp_path):
    run = changed(copied(tmp_path / "a\udcff"), lambda results: results.update(accuracy={"\udcff": 0.5}))
    assert "\\udcff" in report(tmp_path / "report", run)


def test_a_run_that_ended_before_its_first_logged_step_is_compared(tmp_path):
    """As trainer.patience may end it: its speed and memory are unknown, its scores are not."""
    early, second_run = copied(tmp_path / "early"), copied(tmp_path / "other", seed=1)
    records = (early / "metrics.jsonl").read_text().splitlines()
    (early / "metrics.jsonl").write_text("".join(f"{line}\n" for line in records if '"train"' not in line))
    changed(early, lambda results: results.pop("training"))
    page = report(tmp_path / "report", early, picture=True)
    assert "| **top-1 %, last checkpoint** | **90.00** |" in page and "| training, minutes | – |" in page
    assert report(tmp_path / "report", tmp_path / "report" / "early", picture=True) == page
    page = report(tmp_path / "both", early, second_run, picture=True)
    assert f"| training, minutes | {Run(second_run).training['minutes']:.1f} |" in page  # of the run that has it
