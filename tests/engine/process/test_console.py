"""Names and paths are printed literally in tables, lines and progress bars."""

from functools import partial

import pytest

from engine.process import console
from engine.process.console import counted, counting, make_console, progress_bar, tracked
from engine.records.evaluated import Evaluated, print_results
from engine.segmentation.evaluation import iou_table


def test_no_name_or_path_is_taken_for_an_instruction(capsys, monkeypatch):
    name = "[/x] [bold]:bug: \\"
    scores = {"miou": 0.5, "iou": {name: 0.5}, "pixel_accuracy": 0.75, "official": {}}
    evaluated = Evaluated(scores, summary=f"in short {name}", images=1, table=partial(iou_table, scores))
    print_results(make_console(), evaluated, f"{name}/last.pt")
    make_console().print(f"results: {name}")
    output = capsys.readouterr().out
    assert f"{name}/last.pt" in output and f"│ {name} " in output and f"results: {name}" in output
    print_results(make_console(), Evaluated(scores, summary=f"in short {name}", images=1), "last.pt")
    assert f"in short {name}" in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    with progress_bar(make_console()) as progress:
        for _ in tracked(progress, [1], name):
            progress.refresh()
    assert name in capsys.readouterr().out


@pytest.mark.parametrize("columns", [1, 10])
def test_the_narrowest_terminal_gets_tables_and_progress_bars(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    scores = {"miou": 0.5, "iou": {"road": 0.5}, "pixel_accuracy": 0.75, "official": {}}
    evaluated = Evaluated(scores, summary="", images=1, table=partial(iou_table, scores))
    print_results(make_console(), evaluated, "last.pt")
    with progress_bar(make_console()) as progress:
        for _ in tracked(progress, [1], "validation"):
            progress.refresh()
    output = capsys.readouterr().out
    assert "road" in output and "validation" in output


def test_after_some_silence_a_pipe_gets_a_line(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with progress_bar(make_console()) as progress:
        for number in tracked(progress, range(100), "[evaluating]"):
            now[0] += 7.0
            if number == 50:
                progress.broke_silence()  # another line said so
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["[evaluating]: 5 of 100", "[evaluating]: 10 of 100"]
    assert "[evaluating]: 50 of 100" in lines and "[evaluating]: 55 of 100" not in lines
    with counted(make_console(), "checking") as show:
        for seconds in (0.0, 29.0, 2.0, 1.0):
            now[0] += seconds
            show(3, 4)
    assert capsys.readouterr().out == "checking: 3 of 4\n"
    with progress_bar(make_console()) as progress, counting(progress, "windows") as show:
        for _ in tracked(progress, range(2), "images"):
            now[0] += 20.0
            show(20, 30)
    assert capsys.readouterr().out == "images: 1 of 2, windows: 20 of 30\n"
    with counted(make_console(rank=1), "checking") as show:
        now[0] += 60.0
        show(3, 4)
    assert capsys.readouterr().out == ""
