"""The list of measurements on a GPU, and records that are added to pages. No test asserts a time."""

import json
import shlex

import pytest

from engine.configuration.command_line import composed
from scripts import gpu_evidence
from scripts.evidence import documents
from scripts.reports import frame
from tests.scripts.evidence.records import measured
from tests.test_commands import checked


def listed(*words: str) -> list[list[str]]:
    return [shlex.split(line) for line in gpu_evidence.run(composed("gpu_evidence", "out=OUT", *words))]


def test_every_listed_command_is_one_that_its_program_takes(monkeypatch):
    monkeypatch.setattr(frame, "device_of", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for lines in (listed(), listed("rehearse=true")):
        assert len(lines) >= 6 and all(words[0] == "timeout" for words in lines)
        for words in lines:
            checked(words[2:])
    places = ("roots={camvid: CAMVID}", "weights={table3_trained: FILE}")
    first, again = (listed("only=[train_seg]", *places, *more) for more in ((), ("equal_steps=500",)))
    assert (len(first), len(again)) == (4, 7) and again[:4] == first
    for number, words in enumerate(again[4:]):
        checked(words[2:])
        own = {"trainer.steps=500", "data.root=CAMVID", "body.weights=FILE", f"seed={number}", "trainer.capture=true"}
        assert own <= {*words} and f"run_dir=OUT/runs/equal_time/std_equal_time_seed{number}" in words
    rehearsed = listed("only=[train_seg]", "rehearse=true", *places)
    assert not {"data.root=CAMVID", "body.weights=FILE"} & {*rehearsed[0]}
    trained = next(word for word in first[0] if word.startswith("run_dir=")).replace("run_dir", "checkpoint")
    predicting = listed("only=[eval,predict]", "images=a")
    assert all(trained in words for words in predicting) and "input=a" in predicting[-1]
    (trained,) = listed("only=[run_table]", "roots={camvid: a b}")
    assert "roots={camvid: a b}" in trained and "runs=OUT/runs" in trained
    with pytest.raises(ValueError, match=r"only=\[gone\]: expected some of tests, train_seg, run_table, "):
        listed("only=[gone]")


@pytest.mark.parametrize("benchmark", documents.BENCHMARKS, ids=lambda own: own.name)
def test_a_page_can_be_written_from_any_item_alone(benchmark):
    """A call may be stopped after any item."""
    for _, call in frame.written_here(json.loads(documents.RECORDS[benchmark.name].read_text())):
        for name, rows in call["items"].items():
            assert frame.calls_text(benchmark, {"calls": [call | {"items": {name: rows}}]}, benchmark.name)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["networks", "steps", "fit", "layers"])
def test_every_benchmark_runs_rehearsed(program, tmp_path):
    (call, text) = measured(program, tmp_path, *shlex.split(gpu_evidence.REHEARSED[program]))
    assert call["items"] and text and not [row for row in frame.rows_of(call) if "reason" in row]
