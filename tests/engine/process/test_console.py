"""Names and paths are printed literally in tables, lines and progress bars."""

from functools import partial

from engine.process.console import make_console, progress_bar, tracked
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
