"""The GPU evidence, rehearsed on the CPU: what is written, when, and what it never looks like. None asserts a time."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from datasets.camvid import camvid
from engine.configuration.command_line import composed
from scripts.evidence import frame, gpu_pack
from scripts.evidence.gpu import check, run
from scripts.evidence.gpu.decoder import VOCABULARY, Decoder
from scripts.evidence.gpu.part import Setting
from scripts.evidence.gpu.run import PARTS, REHEARSED, Measurement
from scripts.gpu_evidence import run as measured
from tests import trees
from tests.scripts.evidence import records


def command(folder: Path, *words: str) -> Path:
    """Run `python -m scripts.gpu_evidence`; return its page."""
    return measured(composed("gpu_evidence", f"out={folder}", *words))


@pytest.fixture
def here(monkeypatch):
    """Measure in this process, where Triton cannot be interpreted."""
    monkeypatch.setattr(run, "Elsewhere", lambda make, *given: records.here(Measurement, *given))
    monkeypatch.setattr(Setting, "backend", "eager")


def test_a_rehearsal_runs_and_says_what_it_is(here, tmp_path):
    """A whole part: its record, page and picture. They are made again from the record alone."""
    page = command(tmp_path, "part=abn", "rehearse=true")
    record, text = json.loads((tmp_path / "rehearsed_abn.json").read_text()), page.read_text()
    assert record["rehearsal"] and record["left"] == []
    assert list(record["items"]) == list(PARTS["abn"].items(Setting(True)))
    rows = {row["strategy"]: row for row in run.rows_of(record) if row.get("group") == "bn_act"}
    assert rows["in-place II"]["median_ms"] > 0 and rows["in-place II"]["replay_ms"] > 0
    assert f"**{REHEARSED}**" in text and "| in-place II |" in text and "![" in text
    (figure,) = run.pictures(record).values()
    assert "REHEARSAL" in {own.get_text() for own in figure.texts}
    assert not [own for own in run.pictures({**record, "rehearsal": False})[""].texts if own.get_text() == "REHEARSAL"]
    assert (tmp_path / "rehearsed_abn.png").is_file()
    page.unlink()
    assert command(tmp_path, "part=abn", "rehearse=true", "measure=false").read_text() == text
    assert str(tmp_path) not in text + (tmp_path / "rehearsed_abn.json").read_text()


def test_a_rehearsal_is_no_result():
    with pytest.raises(ValueError, match="docs/results has results alone"):
        command(frame.RESULTS / "more", "part=host", "rehearse=true")


def test_no_committed_record_is_a_rehearsal():
    assert not [file for file in frame.RESULTS.rglob("*.json") if '"rehearsal": true' in file.read_text()]


ITEMS = {"a/1": ("a",), "a/2": ("fails",), "b": ("dies",)}


@pytest.fixture
def faked(here, monkeypatch) -> list[str]:
    """A part of three items, the last of which ends the command; returns those that were measured."""
    measured = []

    def measure(setting: Setting, what: str) -> list[dict]:
        measured.append(what)
        if what == "fails" and measured.count(what) == 1:
            raise RuntimeError("out of memory\nat length")
        if what == "dies" and measured.count(what) == 1:
            raise KeyboardInterrupt
        return [{"what": what}]

    part = PARTS["ranks"]._replace(items=lambda setting: ITEMS, measure=measure, sections=lambda rows: [str(rows)])
    monkeypatch.setitem(PARTS, "ranks", part)
    return measured


def test_a_killed_call_leaves_what_is_done_and_a_second_one_adds_the_missing(faked, tmp_path):
    given, file = (tmp_path, "part=ranks", "rehearse=true"), tmp_path / "rehearsed_ranks.json"
    with pytest.raises(KeyboardInterrupt):
        command(*given)
    record = json.loads(file.read_text())
    assert record["items"] == {"a/1": [{"what": "a"}]}
    left = {entry["item"]: entry["reason"] for entry in record["left"]}
    assert left == {"a/2": "failed: RuntimeError: out of memory", "b": "not started"}
    text = command(tmp_path, "part=ranks", "rehearse=true", "measure=false").read_text()
    assert "- a/2: failed: RuntimeError: out of memory\n- b: not started" in text
    command(tmp_path, "part=ranks", "rehearse=true", "only=[b]")
    assert faked == ["a", "fails", "dies", "dies"]
    command(*given)
    record = json.loads(file.read_text())
    assert list(record["items"]) == [*ITEMS] and record["left"] == [] and faked.count("a") == 1


def test_items_are_chosen_by_the_beginning_of_their_names(faked, tmp_path):
    command(tmp_path, "part=ranks", "rehearse=true", "only=[a]")
    assert faked == ["a", "fails"]
    with pytest.raises(ValueError, match="only=a/: expected some of a/1, a/2, b"):
        command(tmp_path, "part=ranks", "rehearse=true", "only=[a/]")


def test_impossible_arguments_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="part=all: expected one of check, host, exact, abn"):
        command(tmp_path, "part=all")
    with pytest.raises(ValueError, match="PyTorch sees no CUDA device"):
        command(tmp_path, "part=host")
    with pytest.raises(ValueError, match="does not exist"):
        command(tmp_path, "part=host", "measure=false")


def test_without_time_nothing_is_started(faked, tmp_path):
    command(tmp_path, "part=ranks", "rehearse=true", "minutes=1e-9")
    assert faked == [] and len(json.loads((tmp_path / "rehearsed_ranks.json").read_text())["left"]) == len(ITEMS)


def test_the_files_with_gpu_tests_are_those_of_the_layers_first():
    files = list(check.items(Setting()))
    assert {"tests/keepless/norms/test_triton.py", "tests/test_train_seg.py"} <= {*files}
    layers = [file.startswith("tests/keepless/") for file in files]
    assert layers == sorted(layers, reverse=True) and 0 < sum(layers) < len(layers)


def test_the_decoder_sees_no_later_token():
    network = Decoder(width=32, heads=2, depth=2)
    tokens = torch.randint(VOCABULARY, (1, 16))
    changed = tokens.clone()
    changed[0, 9] += 1
    different = (network(tokens) != network(changed % VOCABULARY)).any(-1)[0]
    assert different.tolist() == [place >= 9 for place in range(16)]


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_line_of_every_part_runs(part, tmp_path):
    """As the command does: in processes of its own, with Triton's interpreter."""
    page = command(tmp_path, f"part={part}", "rehearse=true", "minutes=30")
    record = json.loads((tmp_path / f"rehearsed_{part}.json").read_text())
    assert record["left"] == [] and REHEARSED in page.read_text()


@pytest.mark.slow
def test_an_item_that_takes_too_long_is_stopped(tmp_path):
    command(tmp_path, "part=exact", "rehearse=true", "minutes=0.001")
    (first, *_) = json.loads((tmp_path / "rehearsed_exact.json").read_text())["left"]
    assert first["reason"] == "stopped"


def test_a_compressed_wheel_holds_the_same_and_no_file_that_is_never_used(tmp_path):
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("a/__init__.py", 1000 * "x = 1\n")
        wheel.writestr("tensorboard/webfiles.zip", b"large")
    (tmp_path / "out").mkdir()
    gpu_pack.compress(tmp_path / "a-1-py3-none-any.whl", tmp_path / "out" / "a.whl")
    with zipfile.ZipFile(tmp_path / "out" / "a.whl") as wheel:
        assert wheel.namelist() == ["a/__init__.py"] and wheel.read("a/__init__.py") == 1000 * b"x = 1\n"


def test_the_pack_has_what_the_command_needs_beyond_torch():
    packed = gpu_pack.required(gpu_pack.NEEDED) - gpu_pack.required(gpu_pack.PackArguments().have)
    assert {"hydra-core", "antlr4-python3-runtime", "omegaconf", "pyyaml", "opencv-python-headless", "pytest"} <= packed
    assert not {"torch", "numpy", "pillow", "torchvision"} & packed


def test_the_pack_has_the_words_of_the_pages_but_no_records():
    with tarfile.open(fileobj=io.BytesIO(gpu_pack.archive())) as packed:
        names = [name for name in packed.getnames() if name.startswith("docs/results/")]
    assert "docs/results/templates/gpu.md" in names
    assert not [name for name in names if name.endswith((".json", ".pt"))]


def test_camvid_is_packed_at_half_its_size(tmp_path):
    trees.camvid_folders(tmp_path / "whole")
    gpu_pack.shrink(tmp_path / "whole", tmp_path / "half")
    for split in ("train", "val"):
        whole, half = (camvid(tmp_path / size, split) for size in ("whole", "half"))
        assert len(half) == len(whole)
        assert half[0].label.shape == half[0].image.shape[:2] == tuple(side // 2 for side in whole[0].image.shape[:2])
