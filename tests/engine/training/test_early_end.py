"""A run that ends early, by trainer.patience: its end is a fact of its checkpoint."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

import train_imagenet
from engine.checkpoint import files as checkpoint
from engine.checkpoint.files import has_ended
from engine.process import jobs
from engine.process.stopping import Preempted
from engine.records.evaluated import Evaluated
from engine.schema.evaluation import Evaluation
from tests.faults.runs import last_of
from tests.ranks import Ranks
from tests.runs import SHORT_SHAPES, checked, classification_config, same

SCORES = {2: 0.3, 4: 0.5, 6: 0.4, 8: 0.5, 10: 0.6, 12: 0.2}  # the best of 4 is not beaten until 10
COMMAND = "python train_imagenet.py seed=0"
KEYS = (*SHORT_SHAPES, "trainer.steps=12", "trainer.evaluate_every_steps=2", "trainer.ema_decay=0.5", "data.workers=0")


def trained(run_dir: Path, *keys: str, scores: Mapping[int, float] = SCORES) -> tuple[dict, list[int]]:
    """The results of a run whose evaluations give these scores, and the steps of the evaluations.

    A step without a score stops the run: it was asked to during the evaluation.
    """
    steps = []

    def evaluate(run, images) -> Evaluated:
        steps.append(run.metrics.done_steps)
        if steps[-1] not in scores:
            raise Preempted("stopped")
        return Evaluated({"top1": scores[steps[-1]], "accuracy": {}}, summary="", images=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_imagenet, "classify_in_run", evaluate)
        config = checked("train_imagenet", *KEYS, f"run_dir={run_dir}", "resume=auto", *keys)
        return train_imagenet.train(config, COMMAND), steps


def val_records(run_dir: Path) -> list[int]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["step"] for record in records if record["kind"] == "val"]


def test_a_run_ends_after_evaluations_that_are_not_better(tmp_path, capsys):
    """It leaves what a normal end leaves: results, best.pt, EMA weights. Starting it again evaluates it again."""
    results, steps = trained(tmp_path, "trainer.patience=2")
    assert steps == [2, 4, 6, 8] and results["top1"] == 0.5  # of the last one, which is not evaluated again
    assert json.loads((tmp_path / "results.json").read_text()) == results
    state = checkpoint.load(last_of(tmp_path))
    best = checkpoint.load(tmp_path / "checkpoints" / "best.pt")
    assert (state["step"], state["total_steps"], state["finished"], state["best"]) == (8, 12, True, [4, 0.5])
    assert state["scores"] == [[step, SCORES[step]] for step in (2, 4, 6, 8)]
    assert best["step"] == 4 and not best["finished"] and state.keys() - best.keys() == set() and "ema" in best
    why = "2 evaluations were not better than step 4's top-1 50.00 % (trainer.patience=2)"
    assert f"the run ends after step 8 of 12: {why}" in (tmp_path / "log.txt").read_text()
    output = capsys.readouterr().out
    assert f"ended     early: {why}" in output
    for name in ("evaluate ", "or best  "):
        kind = "best" if "best" in name else "last"
        assert re.search(rf"(?m)^{name} python eval.py checkpoint=\S*{kind}.pt$", output)
    assert val_records(tmp_path) == [2, 4, 6, 8]
    options = Evaluation(checkpoint=str(last_of(tmp_path)))
    file = options.default_results_file(classification_config(*KEYS), None if has_ended(state) else 8)
    assert file.stem == "results_all_images"  # as of a run that has ended, without its step
    assert jobs.has_ended(tmp_path, COMMAND.split()[1:])

    again, steps = trained(tmp_path, "trainer.patience=2")
    assert steps == [8] and again["top1"] == results["top1"] and val_records(tmp_path) == [2, 4, 6, 8]
    assert same(state["network"], checkpoint.load(last_of(tmp_path))["network"])
    output = (
        "has ended early, after step 8: 2 evaluations were not better than step 4's top-1 50.00 % (trainer.patience=2)"
    )
    assert f"{output}. It is evaluated again; a larger trainer.patience continues" in (tmp_path / "log.txt").read_text()
    with pytest.raises(ValueError, match="trainer.steps was 12 and is 20. The run has ended. To train its weights for"):
        trained(tmp_path, "trainer.patience=2", "trainer.steps=20")


@pytest.mark.parametrize("lost", [False, True], ids=["", "without metrics.jsonl"])
def test_a_resumed_run_continues_the_count(tmp_path, lost):
    with pytest.raises(Preempted):
        trained(tmp_path, "trainer.patience=2", scores={2: 0.3, 4: 0.5, 6: 0.4})  # in the evaluation of step 8
    state = checkpoint.load(last_of(tmp_path))
    assert (state["step"], state["finished"], len(state["scores"])) == (8, False, 3)
    if lost:
        (tmp_path / "metrics.jsonl").unlink()
    results, steps = trained(tmp_path, "trainer.patience=2")
    assert steps == [8] and results["top1"] == 0.5 and checkpoint.load(last_of(tmp_path))["finished"]


@pytest.mark.table
@pytest.mark.parametrize("patience", ["3", "null"])
def test_a_larger_patience_continues_to_the_weights_of_a_run_that_never_stopped(tmp_path, patience):
    """Step 10 is the best, so that the run then reaches its last step."""
    trained(tmp_path / "early", "trainer.patience=2")
    with pytest.raises(Preempted):
        trained(tmp_path / "early", f"trainer.patience={patience}", scores={10: 0.6})
    assert not jobs.has_ended(tmp_path / "early", COMMAND.split()[1:])  # the end was none
    _, steps = trained(tmp_path / "early", f"trainer.patience={patience}")
    whole, _ = trained(tmp_path / "whole")
    assert steps == [12] and val_records(tmp_path / "early") == val_records(tmp_path / "whole") == [2, 4, 6, 8, 10, 12]
    early, never = (checkpoint.load(last_of(tmp_path / name)) for name in ("early", "whole"))
    assert early["finished"] and same(early["network"], never["network"]) and same(early["ema"], never["ema"])
    assert early["best"] == never["best"] == [10, 0.6] and whole["top1"] == 0.2


def test_a_smaller_patience_ends_a_resumed_run_unless_it_is_better_now(tmp_path):
    for better, steps in ((0.4, [10]), (0.9, [10, 12])):
        run_dir = tmp_path / str(better)
        with pytest.raises(Preempted):
            trained(run_dir, "trainer.patience=5", scores={step: SCORES[step] for step in (2, 4, 6, 8)})
        assert trained(run_dir, "trainer.patience=2", scores=SCORES | {10: better})[1] == steps
        assert checkpoint.load(last_of(run_dir))["step"] == steps[-1]


def test_a_score_that_is_no_number_is_not_better(tmp_path):
    _, steps = trained(tmp_path, "trainer.patience=2", scores=dict.fromkeys(SCORES, float("nan")))
    assert steps == [2, 4] and checkpoint.load(last_of(tmp_path))["best"] is None
    assert "2 evaluations were not better than no number (" in (tmp_path / "log.txt").read_text()


def ended_by_a_rank(rank: int, run_dir: str) -> list[int]:
    return trained(Path(run_dir), "trainer.patience=2")[1]


def test_two_processes_agree_on_the_end(tmp_path):
    """The checkpoint is read after both have ended: the first writes it while the second may be done."""
    pair = Ranks(2, tmp_path)
    first_steps, second_steps = pair.run(ended_by_a_rank, str(tmp_path / "run"))
    pair.stop()
    assert first_steps == second_steps == [2, 4, 6, 8]
    assert checkpoint.load(last_of(tmp_path / "run"))["step"] == 8
