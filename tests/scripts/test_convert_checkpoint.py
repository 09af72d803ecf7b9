"""Converted checkpoints: the same outputs, all that other commands need, and the way back, bitwise identical."""

import importlib
import json
import sys
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from datasets.shapes import CLASSES
from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.checkpoint import recorded
from eval import evaluate
from models.checkpoints.released import load_released
from scripts.convert_checkpoint import convert
from scripts.predict import predict
from tests import released_files as files
from tests import trees
from tests.bodies import small_resnext
from tests.checkpoints import saved
from tests.runs import SHORT_SHAPES, checked, classification_config, same, without_counts

IMAGES_OF_SHAPES = importlib.import_module("datasets.shapes").IMAGES  # the package exports a function of that name


def run(source, output, *overrides: str) -> str:
    return "\n".join(convert(checked("convert_checkpoint", f"input={source}", f"output={output}", *overrides)))


@pytest.fixture(scope="module")
def vistas(tmp_path_factory):
    """A narrow segmentation file in float32, as published, and its checkpoint."""
    folder = tmp_path_factory.mktemp("vistas")
    path, _ = files.small_vistas(folder / "vistas.pth.tar", dtype=torch.float32)
    run(path, folder / "vistas.pt", "scale=released")
    return path, folder / "vistas.pt"


def test_the_segmentation_network_predicts_as_released(vistas, tmp_path):
    state = checkpoint.load(vistas[1])
    network = assemble.network_of(recorded.of_checkpoint(state, "it"), 65)
    load_released(network, vistas[0])
    assert same(network.state_dict(), state["network"])

    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)).save(tmp_path / "street.png")
    options = (f"checkpoint={vistas[1]}", f"input={tmp_path / 'street.png'}", f"output={tmp_path / 'out'}")
    ids = predict(checked("predict", *options, "device=cpu", "data.base_size=96"))
    assert np.asarray(Image.open(ids[0])).shape == (40, 60)
    assert len(json.loads((tmp_path / "out" / "classes.json").read_text())) == 65
    options = (f"checkpoint={vistas[1]}", f"data.root={trees.vistas(tmp_path / 'data')}", "workers=0", "device=cpu")
    results = evaluate(checked("eval", *options, "data.base_size=64", f"results={tmp_path / 'results.json'}"))
    assert list(results["iou"]) == [f"Class {number}" for number in range(65)]  # compared by their number only


def test_class_names_come_from_the_data_or_a_file(vistas, tmp_path):
    root = trees.vistas(tmp_path / "data")
    expected = [f"Class {number}" for number in range(65)]
    (tmp_path / "names.txt").write_text("\n".join(expected) + "\n\n")
    for colours in (f"data.root={root}", f"classes={root / 'config.json'}", f"classes={tmp_path / 'names.txt'}"):
        printed = run(vistas[0], tmp_path / "net.pt", "scale=released", colours)
        state = checkpoint.load(tmp_path / "net.pt")
        assert state["classes"] == expected and "65 classes: Class 0, …" in printed and "unnamed_classes" not in state
        official = [tuple(label["color"]) for label in trees.vistas_config()["labels"][:65]]
        assert (list(map(tuple, state["palette"])) == official) == ("txt" not in colours)
        assert state["config"]["data"]["root"] == (str(root) if colours.startswith("data.root") else None)


def test_class_names_of_imagenet(tmp_path):
    path, _ = files.small_resnext(tmp_path / "net.pth.tar")
    printed = run(path, tmp_path / "net.pt", "scale=released")
    assert "classification with norm=inplace" in printed and "3 classes: numbered" in printed
    for split in ("train", "val"):
        for name in ("n02", "n01", "n03"):
            trees.write(tmp_path / "data" / split / name / f"{split}_{name}.JPEG", np.zeros((8, 8, 3), np.uint8))
    run(path, tmp_path / "net.pt", "scale=released", f"data.root={tmp_path / 'data'}")
    assert checkpoint.load(tmp_path / "net.pt")["classes"] == ["n01", "n02", "n03"]
    for split, name, number in ((split, f"n0{n}", n) for split in ("train", "val") for n in (1, 2, 3)):
        (tmp_path / "data" / split / name).rename(tmp_path / "data" / split / str(4 * number))  # 4, 8, 12
    with pytest.raises(ValueError, match="does not name its 3 classes, .* 12, 4, 8 as text, .* Give data.class_order="):
        run(path, tmp_path / "net.pt", "scale=released", f"data.root={tmp_path / 'data'}")
    run(path, tmp_path / "net.pt", "scale=released", f"data.root={tmp_path / 'data'}", "data.class_order=numbers")
    state = checkpoint.load(tmp_path / "net.pt")
    assert state["classes"] == ["4", "8", "12"] and state["config"]["data"]["class_order"] == "numbers"
    names = tmp_path / "names.txt"
    for text, message in (("cat\ndog\n", " has 2 classes: expected 3"), ("crane\ncock\ncrane\n", " has crane more")):
        names.write_text(text)
        with pytest.raises(ValueError, match=message):
            run(path, tmp_path / "net.pt", "scale=released", f"classes={names}")
    names.write_text("0\n1\n2\n")  # names that a user gave
    printed = run(path, tmp_path / "net.pt", "scale=released", f"classes={names}")
    assert "3 classes: 0, …" in printed and "for ImageNet the class folders (n01440764, …) in sorted order" in printed
    assert "unnamed_classes" not in checkpoint.load(tmp_path / "net.pt")


def test_to_standard_norms(vistas, tmp_path):
    """eps and activation are printed, as the file does not hold them."""
    network = checkpoint.load(vistas[1])["network"]
    read = {"std.pth": partial(torch.load, weights_only=True), "std.safetensors": load_file}
    for (source, overrides), name in product(((vistas[1], ()), (vistas[0], ("scale=released",))), read):
        printed = run(source, tmp_path / name, "format=standard_bn", *overrides)
        assert "its norms need eps=1e-05 and leaky_relu (0.01), which" in printed
        assert same(without_counts(read[name](tmp_path / name)), without_counts(network))


def test_norms_of_another_library_s_network_keep_their_eps_in_what_is_printed(tmp_path):
    config = classification_config("body=torchvision", "body.network=mobilenet_v3_small", "norm=std")
    saved(tmp_path / "last.pt", config, CLASSES)
    printed = run(tmp_path, tmp_path / "std.pth", "format=standard_bn")
    assert "eps=1e-05 and relu (in the body mobilenet_v3_small's own eps, and this for its ReLUs alone)" in printed


def test_what_cannot_be_converted_is_named(vistas, tmp_path):
    path, _ = files.small_resnext(tmp_path / "net.pth.tar")
    bare = files.write_classifier(tmp_path / "body.pth.tar", without_counts(small_resnext().state_dict()))
    few, _ = files.small_vistas(tmp_path / "few.pth.tar", classes=19)
    output, scale = tmp_path / "out.pt", "scale=released"
    for source, target, overrides, message in (
        (path, output, (), "give scale=released if .* or scale=raw"),
        (vistas[1], output, (scale,), "scale=released has no effect on .*, a checkpoint of ours: leave it out"),
        (bare, output, (scale,), "has no classifier: load it with init.weights"),
        (few, output, (scale,), "segments 19 classes: expected the 65 of Vistas"),
        (path, tmp_path, (scale,), "is a folder: give another file"),
        (path, tmp_path / "x.onnx", (scale,), "x.onnx: scripts.export writes programs; expected NAME.pt or .safet"),
        (path, path, (scale,), "is the input: give another file"),
        (path, output, (scale, "classes=a.txt", "data.root=b"), "classes=a.txt and data.root=b: give one of them"),
        (path, output, (scale, "format=standard_bn", "classes=a"), "only a checkpoint holds class names"),
    ):
        with pytest.raises(ValueError, match=message):
            run(source, target, *overrides)
    assert not output.exists()


def test_weights_to_give_away_score_as_their_run_and_name_no_folder(tmp_path, monkeypatch):
    """They hold the EMA weights if there are any, and nothing that only a training needs."""
    monkeypatch.setitem(IMAGES_OF_SHAPES, "val", 40)
    folders = (f"run_dir={tmp_path}", f"init.weights={tmp_path / 'start.pt'}")
    config = classification_config(*SHORT_SHAPES, *folders, "trainer.ema_decay=0.9", "trainer.steps=2")
    average = assemble.network_of(config, 8).state_dict()
    saved(
        tmp_path / "last.pt", config, CLASSES, ema=average, optimizer={}, random={"cpu": [torch.zeros(1)], "cuda": []}
    )
    names = "net.pt", "net.safetensors"
    for name in names:
        for _ in range(2):  # the second time it is replaced
            assert "the EMA weights of step 2" in run(tmp_path, tmp_path / name)
        alone = checkpoint.load(tmp_path / name)
        assert alone.keys() == {"format", "task", "step", "classes", "config", "network"}
        assert same(alone["network"], average) and str(tmp_path) not in str(alone["config"])
    options = ("workers=0", "device=cpu", f"results={tmp_path / 'scores.json'}")
    scores = [evaluate(checked("eval", f"checkpoint={tmp_path / name}", *options)) for name in ("last.pt", *names)]
    assert scores[0]["confusion_matrix"] == scores[1]["confusion_matrix"] == scores[2]["confusion_matrix"]


def test_a_file_of_safetensors_holds_all_of_a_checkpoint_for_other_programs_too(vistas, tmp_path, monkeypatch):
    run(vistas[1], tmp_path / "net.safetensors")
    state, expected = checkpoint.load(tmp_path / "net.safetensors"), checkpoint.load(vistas[1])
    assert same(state.pop("network"), weights := expected.pop("network"))
    assert same(load_file(tmp_path / "net.safetensors"), weights)
    assert json.dumps(state, sort_keys=True) == json.dumps(expected, sort_keys=True)
    with_mean = {**state, "network": {"body.a": torch.ones(2, 3).T}, "mean_image": torch.rand(3, 4, 4)}
    checkpoint.write_alone(tmp_path / "mean.safetensors", with_mean)
    again = checkpoint.load(tmp_path / "mean.safetensors")
    assert same(again["network"], with_mean["network"]) and torch.equal(again["mean_image"], with_mean["mean_image"])
    (cut := tmp_path / "cut.safetensors").write_bytes((tmp_path / "net.safetensors").read_bytes()[:-9])
    with pytest.raises(ValueError, match="cut.safetensors is damaged"):
        checkpoint.load(cut)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    output = tmp_path / "x.safetensors"
    for use in (partial(checkpoint.load, tmp_path / "net.safetensors"), partial(run, vistas[1], output)):
        with pytest.raises(ValueError, match="safetensors needs the package safetensors: pip install safetensors"):
            use()
