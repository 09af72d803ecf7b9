"""Texts on the command line: as they were typed, and in overrides that messages advise."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from engine.checkpoint.recorded import from_plain
from engine.configuration import config
from engine.configuration.command_line import composed
from engine.configuration.config import plain
from engine.configuration.texts import as_typed, value_of
from engine.schema.keys import declared_in, override
from engine.schema.segmentation import SegmentationRun
from scripts import compare_runs  # noqa: F401  # declares its command
from scripts.run_table import RunTable
from tests.runs import run_config

PATHS = (
    *("runs/lr=1,bs=2/last.pt", "a b/c", "Straße/街", "a'b\"c/d", "[x] {y} (z)/:w", "~/a", "${run_dir}/a", "a\\${b}"),
    *("back\\slash\\", "\\\\'\\\"", "null", "12", "1e3", "", " ", "/", "#", "$a/*?!;&|<>`", "a//b", "plain/net-1.pt"),
)


@pytest.mark.parametrize("path", PATHS)
def test_an_override_that_is_advised_reads_back_to_the_path(path):
    """A shell and Hydra read the word."""
    (word,) = shlex.split(shlex.quote(override("checkpoint", path)))
    assert composed("eval", word).checkpoint == path


TEXTS = (
    *("1.10", "2024_01_01", "1e5", "0x1f", "007", "+5", ".5", "true", "No", "inf", "NaN"),
    *("~/a", "/data/Straße", "a=b,c", "C:\\My (1)\\x", "/x/a\\ b (2)", "a${b", "a\\"),
    *("it's", "runs (1)", "[a]", "{a: b}", "a: b", "a#b", "-1", ""),
)


@pytest.mark.parametrize(
    "typed, read", [*((text, text) for text in TEXTS), ("'1.10'", "1.10"), ('"a b"', "a b"), (r"a\ b\,", "a b,")]
)
def test_texts_are_read_as_typed(typed, read):
    """Hydra alone reads numbers and booleans, as 1.1, 20240101 and True."""
    assert composed("eval", f"checkpoint={typed}", f"results={typed}") == composed(
        "eval", override("checkpoint", read), override("results", read)
    )


def test_a_path_that_exists_needs_no_quotes_of_hydra(tmp_path, monkeypatch):
    """Names of sweeps have = and commas, which Hydra takes for its own."""
    (tmp_path / "norm=std,optim.lr=0.1").mkdir()
    monkeypatch.chdir(tmp_path)
    values = composed("compare_runs", "runs=norm=std,optim.lr=0.1", "out=report")
    assert values.runs == "norm=std,optim.lr=0.1"


@pytest.mark.parametrize("name", ["2024_01", "1.10", "007", "true", "inf"])
def test_a_name_where_a_list_may_stand_is_read_as_typed(name):
    assert run_config("data=folder", f"data.train_split={name}", f"data.val_split={name}").data.train_split == name


def test_interpolations_in_texts_are_hydra_s():
    assert composed("train_seg", "run_dir=${seed}/1.10").run_dir == "0/1.10"
    assert composed("train_seg", "run_dir=${seed} (1)").run_dir == "0 (1)"


def test_texts_in_lists_and_mappings_are_read_as_typed():
    values = composed("train_seg", "data.train_split=[a, 1.10,x=1]", "data.mean=[0,0,1e-1]")
    assert (list(values.data.train_split), list(values.data.mean)) == (["a", "1.10", "x=1"], [0.0, 0.0, 0.1])
    for word, read in (
        ("roots={vistas: ~/a:b, camvid: /x=1 (2)}", {"vistas": "~/a:b", "camvid": "/x=1 (2)"}),
        ("overrides=[a=[1,2],'b,c',d=3]", ["a=[1,2]", "b,c", "d=3"]),
    ):
        key, _, text = word.partition("=")
        assert value_of(text, declared_in(RunTable)[key]) == read


@pytest.mark.parametrize(
    "typed, jobs",
    [("1.10,a b,~/c", ["1.10", "a b", "~/c"]), ("choice('1.10',a)", ["1.10", "a"]), ("range(1,3)", ["1", "2"])],
)
def test_texts_in_sweeps_are_read_as_typed(typed, jobs):
    word = as_typed(f"data.root={typed}", SegmentationRun, sweeps=True)
    override = OverridesParser.create().parse_override(word)
    assert [composed("train_seg", f"data.root={text}").data.root for text in override.sweep_string_iterator()] == jobs


@pytest.mark.parametrize("typed", ["false", "False", "FALSE"])
def test_false_is_a_choice_in_any_case(typed):
    assert run_config(f"loss.tiles={typed}").loss.tiles == "false"


def test_a_key_may_take_a_word_or_a_boolean_and_nothing_else():
    """A resumed run's configuration says whether it was captured."""
    for typed, read in (("auto", "auto"), ("true", True), ("False", False)):
        run = run_config(f"trainer.capture={typed}")
        assert run.trainer.capture is read or run.trainer.capture == read == "auto"
        assert from_plain(plain(run), SegmentationRun).trainer.capture == read
    for typed in ("maybe", "1", "null"):
        with pytest.raises(ValueError, match=f"^trainer.capture={typed}: expected auto, true or false$"):
            config.typed(composed("train_seg", f"trainer.capture={typed}"), SegmentationRun)
