"""The list of measurements on a GPU, and records that are added to pages. No test asserts a time."""

import json
import re
import shlex

import pytest

from benchmarks import documents, frame, gpu_evidence
from engine.configuration import command_line
from tests.benchmarks.records import measured
from tests.test_commands import checked

pytestmark = pytest.mark.slow("measures: minutes in all")


def listed(*words: str) -> list[list[str]]:
    arguments = command_line.checked("gpu_evidence", "out=OUT", *words)
    return [shlex.split(line) for line in gpu_evidence.commands(arguments)]


def test_every_listed_command_is_one_that_its_program_takes(monkeypatch, tmp_path):
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(frame, "device_of", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    places = ("roots={camvid: a b, cityscapes: c}", "weights={table3_trained: FILE}")
    lines, rehearsed = listed("equal_steps=500", *places), listed("equal_steps=500", "rehearse=true", *places)
    assert len(lines) == len(rehearsed) == len(gpu_evidence.COMMANDS) == len(listed()) + 3
    for words in lines + rehearsed:
        assert words[0] == "timeout"
        checked(words[2:])
    for command, tiny in zip(lines, rehearsed, strict=True):
        default = {word for word in command if not re.search("a b|FILE", word)}
        assert default < {*tiny} and not {*tiny} & {'data.root="a b"', "body.weights=FILE"}
    for words in lines[1:10]:
        assert words.count('data.root="a b"') == words.count("body.weights=FILE") == 1
    assert len({*re.findall(r"run_dir=\S+|results=\S+", " ".join(sum(lines, [])))}) == 9 + 4  # none is replaced
    trained = lines[3][-1].replace("run_dir", "checkpoint")
    predicting = listed("only=[eval,predict]", "images=OUTSIDE/IMAGES")
    assert all(trained in words for words in predicting) and "input=OUTSIDE/IMAGES" in predicting[-1]
    (table,) = listed("only=[run_table]", *places)
    assert "runs=OUT/runs" in table and 'roots={camvid:"a b"}' in table
    with pytest.raises(ValueError, match=r"only=.*loss.*: expected a list, each one of tests, train_seg, networks, "):
        listed("only=[loss]")


@pytest.mark.parametrize("benchmark", documents.BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_a_page_can_be_written_from_any_item_alone(benchmark):
    """A call may be stopped after any item."""
    for _, call in frame.current_calls(json.loads(documents.RECORDS[benchmark.name].read_text())):
        for name, rows in call["items"].items():
            assert frame.calls_text(benchmark, {"calls": [call | {"items": {name: rows}}]}, benchmark.name)


@pytest.mark.slow("whole measurements")
@pytest.mark.parametrize("program", ["networks", "steps", "fit", "layers"])
def test_every_benchmark_runs_rehearsed(program, tmp_path):
    (call, text) = measured(program, tmp_path, *shlex.split(gpu_evidence.REHEARSED[program]))
    assert call["items"] and text and not [row for row in frame.rows_of(call) if "reason" in row]
