"""The GPU evidence, rehearsed on the CPU: what is written, and what it never looks like. None asserts a time."""

import json
from pathlib import Path

import pytest
import torch

from engine.configuration.command_line import composed
from scripts import gpu_evidence
from scripts.evidence import check, documents, fit, layers
from scripts.gpu_evidence import PARTS, Part, run
from scripts.reports import frame


def command(folder: Path, *words: str) -> str:
    """Run `python -m scripts.gpu_evidence`; return its tables."""
    return run(composed("gpu_evidence", f"out={folder}", *words))


def test_a_rehearsal_runs_and_says_what_it_is(in_process, monkeypatch, tmp_path):
    """A whole part: its record, tables and picture. They are made again from the record alone."""
    own = {"backend": "eager", "compiler": None, "groups": ["bn_act"]}  # Triton cannot be interpreted in this process
    monkeypatch.setitem(PARTS, "abn", PARTS["abn"]._replace(rehearsed=PARTS["abn"].rehearsed | own))
    text = command(tmp_path, "part=abn", "rehearse=true")
    (call,) = json.loads((tmp_path / "rehearsed_abn.json").read_text())["calls"]
    assert call["rehearsal"] and call["left"] == {}
    assert call["command"] == "python -m scripts.gpu_evidence part=abn rehearse=true out=DIR"
    rows = {row["strategy"]: row for row in frame.rows_of(call) if row.get("group") == "bn_act"}
    assert rows["in-place II"]["times_ms"][0] > 0 and rows["in-place II"]["captured_ms"][0] > 0
    assert f"**{frame.REHEARSED}**" in text and "| in-place II |" in text and "(rehearsed_abn.png)" in text
    drawn: list[str] = []
    monkeypatch.setattr(frame.charts, "save", lambda figure, file: drawn.extend(own.get_text() for own in figure.texts))
    assert command(tmp_path, "part=abn", "rehearse=true", "measure=false") == text
    assert drawn == ["REHEARSAL"] and (tmp_path / "rehearsed_abn.png").is_file()
    assert str(tmp_path) not in text + (tmp_path / "rehearsed_abn.json").read_text()
    assert not layers.picture(call).texts


def test_one_command_goes_through_all_parts_in_pieces(in_process, monkeypatch, tmp_path):
    """Each part has its minutes. What has failed, or does not fit into them, keeps no other part from its turn.

    Without CamVid there are no trainings. An item is not started in less time than the one before it took.
    """
    clock, measured = [0.0], []

    def part(name: str, minutes: float) -> Part:
        """A part with three items that take a minute each; the second fails."""

        def measure(arguments: frame.Arguments, number: int) -> list[dict]:
            clock[0] += 60
            measured.append(f"{name}{number}")
            if number == 2:
                raise RuntimeError("out of memory")
            return [{"number": number}]

        items = {str(number): (number,) for number in (1, 2, 3)}
        about = frame.Benchmark(name, frame.Arguments, lambda arguments: items, measure, lambda arguments: (name, ""))
        return Part(minutes, about, [{}], {})

    monkeypatch.setattr(
        gpu_evidence, "PARTS", {"host": part("a", 5), "abn": part("b", 1), "train": part("d", 9), "fit": part("c", 5)}
    )
    monkeypatch.setattr(gpu_evidence.GpuArguments, "check", lambda arguments: None)  # that there is a device
    for module in (gpu_evidence, frame):
        monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    first = command(tmp_path, "minutes=1.5")
    assert measured == ["a1", "b1"] and first.splitlines()[:2] == ["host: 2: not started", "host: 3: not started"]
    assert first.endswith("the same command goes on")
    second = command(tmp_path, "minutes=2")
    assert measured[2:] == ["a2", "a3"] and second.startswith("host: 2: failed: RuntimeError: out of memory\nabn: 2: ")
    last = command(tmp_path, "minutes=4")
    assert measured[4:] == ["c1", "c2", "c3"] and "abn: 3: not started\ntrain: needs camvid=DIR\n" in last
    assert last.endswith("done; part=NAME tries again what is left of it")
    tables = command(tmp_path, "measure=false")
    assert [line for line in tables.splitlines() if line.startswith("## ")] == ["## a", "## b", "## c"]
    command(tmp_path, "part=abn")
    assert measured[7:] == ["b2", "b3"]


@pytest.mark.parametrize("words", [("camvid=nowhere",), ("part=train",)])
def test_a_missing_folder_of_camvid_is_named_before_the_device_is_used(monkeypatch, tmp_path, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_evidence, "calls_of", lambda *_: [])
    with pytest.raises(ValueError, match="^camvid=(null|nowhere): expected the folder of CamVid"):
        command(tmp_path, *words)


def test_measured_parts_go_into_the_records_of_the_pages(monkeypatch, tmp_path):
    """A record of one new item replaces that item, and keeps the others; a new call is added."""
    record = tmp_path / "fit.json"
    monkeypatch.setitem(documents.RECORDS, "fit", record)
    record.write_text((frame.RESULTS / "gpu" / "fit.json").read_text())
    first, second = json.loads(record.read_text())["calls"]
    name, missing = next(iter(first["items"])), next(iter(first["left"]))
    new = [{"network": "a network", "norm": "std", "most": 3}]
    own = {"items": {name: new, missing: new}, "environment": first["environment"] | {"commit": "another"}}
    (tmp_path / "gpu_fit.json").write_text(json.dumps({"calls": [first | own, first | own | {"arguments": {}}]}))
    command(tmp_path, "measure=false", "keep=true")
    before = record.read_text()
    command(tmp_path, "measure=false", "keep=true")
    assert record.read_text() == before
    changed, same, added = json.loads(record.read_text())["calls"]
    assert changed["items"] == first["items"] | own["items"] and missing not in changed["left"]
    commits = f"{first['environment']['commit']}, another"
    assert changed["environment"] == first["environment"] | {"commit": commits}
    assert same == second and added["arguments"] == {}
    assert "| a network | std |" in documents.calls_text(fit.BENCHMARK, json.loads(record.read_text()), "fit")


@pytest.mark.parametrize("benchmark", [*documents.BENCHMARKS, check.BENCHMARK, fit.BENCHMARK], ids=lambda own: own.name)
def test_a_page_can_be_written_from_any_item_alone(benchmark):
    """A call may be stopped after any item."""
    for call in json.loads(documents.RECORDS[benchmark.name].read_text())["calls"]:
        for name, rows in call["items"].items():
            assert frame.calls_text(benchmark, {"calls": [call | {"items": {name: rows}}]}, benchmark.name)


def test_every_part_has_the_arguments_of_its_benchmark_and_names_what_it_measures(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sum(part.minutes for part in PARTS.values()) <= 40
    for part in PARTS.values():
        for own in (*part.calls, part.rehearsed):
            arguments = part.benchmark.schema(out="x.json", **own)
            assert part.benchmark.items(arguments)
    (of_layers,), (of_trainings,) = check.items(frame.Arguments()).values()
    assert "tests/keepless/norms/test_triton.py" in of_layers and "tests/test_train_seg.py" in of_trainings


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_line_of_every_part_runs(part, tmp_path):
    """The command runs each part in processes of its own; here with Triton's interpreter."""
    text = command(tmp_path, f"part={part}", "rehearse=true", "minutes=30")
    (call,) = json.loads((tmp_path / f"rehearsed_{part}.json").read_text())["calls"]
    assert call["left"] == {} and frame.REHEARSED in text
    if part == "exact":  # in float64 recomputed gradients are the plain network's
        exact = [row["error"] for row in frame.rows_of(call) if row["precision"] == "float64"]
        assert exact and max(exact) <= 1e-12 and "- float32: errors to float64 are at most " in text
