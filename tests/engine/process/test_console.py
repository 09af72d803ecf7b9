"""Names and paths are printed literally in tables, lines and progress bars."""

import re
import shutil
from functools import partial

import pytest

from datasets.file_list import readable
from engine.process import console
from engine.process.console import counted, make_console, progress_bar, tracked
from engine.records.evaluated import Evaluated, print_results
from engine.segmentation.evaluation import iou_table


def test_control_characters_of_names_reach_neither_terminal_nor_log(capsys, tmp_path, monkeypatch):
    """They would clear the terminal, set its title or fake lines; text that runs backwards hides what a name is."""
    name = "a\x1b]0;title\x07\r\x9b2J\u202egnp.exe"
    shown = r"a\x1b]0;title\x07\r\x9b2J\u202egnp.exe"
    assert readable(name) == shown and readable("a\nb\t") == r"a\nb\t" and readable("a\nb\t", lines=True) == "a\nb\t"
    assert readable("Straße\u00a0é\u3000👩\u200d🚒") == "Straße\u00a0é\u3000👩\u200d🚒"  # what names really hold
    for terminal in (False, True):
        if terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")
        for rank in (0, 1):
            console.log_to(made := make_console(rank), tmp_path / "log.txt", rank)
            made.print(name, soft_wrap=True)
            made.print(console.table_of(["name"], [[name]], title=name))
            console.logger.warning(f"{name} is bad")
            with progress_bar(made) as progress:
                next(tracked(progress, [1], name))
                progress.refresh()
        out, error = capsys.readouterr()
        assert out.count(shown) >= 3 and error.count(f"rank 1: {shown} is bad") == 1
        without_colours = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", out)
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*without_colours, *error}
    with open(tmp_path / "log.txt", newline="") as log:
        assert re.fullmatch(rf"(\S+ \S+ {re.escape(shown)} is bad\n)+", log.read())


def test_a_log_that_is_removed_goes_on_in_a_new_file_and_leads_nowhere_else(tmp_path):
    log = tmp_path / "run" / "log.txt"
    console.log_to(make_console(), log)
    for line in range(3):
        console.logger.info(f"line {line}")
        if line == 0:
            log.unlink()
    lost, *lines = log.read_text().splitlines()
    assert lost.startswith("earlier lines are lost: ") and [line[-6:] for line in lines] == ["line 1", "line 2"]
    shutil.rmtree(log.parent)
    console.logger.info("this ends nothing")
    log.parent.mkdir()
    log.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match=f"Too many levels of symbolic links: '{log}'"):
        console.log_to(make_console(), log)
    assert not (tmp_path / "other").exists()


def test_no_name_or_path_is_taken_for_an_instruction(capsys, monkeypatch):
    name = "[/x] [bold]:bug: \\"
    scores = {"miou": 0.5, "iou": {name: 0.5}, "accuracy": {name: 0.5}, "pixel_accuracy": 0.75}
    evaluated = Evaluated(scores, summary=f"in short {name}", images=1, table=partial(iou_table, scores))
    print_results(make_console(), evaluated, f"{name}/last.pt")
    make_console().print(f"results: {name}")
    output = capsys.readouterr().out
    assert f"{name}/last.pt" in output and f"│ {name} " in output and f"results: {name}" in output
    assert re.search(r"mean \(mIoU\) +│ 50.00 ", output) and re.search("pixel accuracy +│ 75.00 ", output)
    print_results(make_console(), Evaluated(scores, summary=f"in short {name}", images=1), "last.pt")
    assert f"in short {name}" in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    with progress_bar(make_console()) as progress:
        for _ in tracked(progress, [1], name):
            progress.refresh()
    assert name in capsys.readouterr().out
    with counted(make_console(), "checking") as show:
        show(2, 7)
    assert "2/7" in capsys.readouterr().out
