"""Images of other than three channels, from their files to predictions."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from engine.checkpoint import files as checkpoint
from engine.prediction.opening import open_network
from eval import evaluate
from scripts.export import export
from scripts.predict import predict
from tests.runs import checked
from train_seg import train

SIZE = 48, 64
KEYS = (
    *("data=folder", "data.channels=4", "norm.backend=eager", "data.workers=0", "data.crop_size=32"),
    *("data.crops_per_minibatch=8", "trainer.device=cpu", "trainer.epochs=null", "trainer.evaluate_every_epochs=null"),
)


def infrared(root: Path, images: dict[str, int]) -> Path:
    """Images of noise, with a fourth channel that is bright where the label has its second class."""
    for split, number in ((split, number) for split, count in images.items() for number in range(count)):
        numbers, label = np.random.default_rng([number, split == "val"]), np.zeros(SIZE, np.uint8)
        y, x = numbers.integers(0, 24), numbers.integers(0, 32)
        label[y : y + 20, x : x + 28] = 1
        image = numbers.integers(0, 256, (*SIZE, 4), dtype=np.uint8)
        image[..., 3] = np.where(label, 220, 40)
        for kind, pixels in (("images", image), ("labels", label)):
            (file := root / split / kind / f"{number}.png").parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    (root / "classes.json").write_text(json.dumps({"classes": [{"name": "ground"}, {"name": "plant"}]}))
    return root


@pytest.mark.slow
def test_a_class_that_only_the_fourth_channel_shows_is_learnt_and_predicted(tmp_path, capsys):
    root, run = infrared(tmp_path / "data", {"train": 12, "val": 4}), tmp_path / "run"
    keys = (f"data.root={root}", *KEYS)
    range16 = [0, 9, 0, 99, 0, 999, 0, 9999]  # of a channel each, which images of 8 bits do not need
    options = "data.shown=[4,3,2]", f"data.range16={range16}".replace(" ", "")
    trained = train(checked("train_seg", *keys, f"run_dir={run}", "trainer.steps=12", *options))
    assert trained["miou"] > 0.5
    state, config = checkpoint.load(run / "checkpoints" / "last.pt"), (run / "config.yaml").read_text()
    mean, std = state["config"]["data"]["mean"], state["config"]["data"]["std"]
    pixels = np.stack([np.asarray(Image.open(file)) for file in (root / "train" / "images").iterdir()]) / 255
    assert np.allclose(mean, pixels.mean(axis=(0, 1, 2)), atol=1e-4)
    assert np.allclose(std, pixels.std(axis=(0, 1, 2)), atol=1e-4)
    assert f"mean:\n  - {mean[0]}\n" in config and "channels: 4\n" in config

    again = evaluate(checked("eval", f"checkpoint={run}", "device=cpu", "workers=0", f"overlays={tmp_path / 'shown'}"))
    assert again["confusion_matrix"] == trained["confusion_matrix"]
    image = np.asarray(Image.open(root / "val" / "images" / "0.png"))
    shown = np.asarray(Image.open(tmp_path / "shown" / "0.png"))
    assert np.array_equal(shown[:, : SIZE[1]], image[..., [3, 2, 1]])

    out = tmp_path / "out"
    options = (f"checkpoint={run}", f"input={root / 'val' / 'images'}", f"output={out}", "device=cpu")
    predict(checked("predict", *options, f"report={tmp_path / 'report.html'}"))
    network = open_network(run)
    assert network.range16 == range16
    expected = network.predict(image)
    assert np.array_equal(np.asarray(Image.open(out / "ids" / "0.png")), network.label_ids[expected])
    for wrong in (image[..., :3], image[..., 0], image.astype(np.uint16), Image.fromarray(image)):
        with pytest.raises(ValueError, match=r"got .*: expected a uint8 array \(H, W, 4\), or the path of a file"):
            network.predict(wrong)
    with pytest.raises(ValueError, match=r"images of shape \(1, 1, 32, 32\): expected \(N, 4, H, W\)"):
        network(torch.zeros(1, 1, 32, 32, dtype=torch.uint8))

    facts = export(checked("export", f"checkpoint={run}", f"output={tmp_path / 'n.pt2'}"))
    assert facts["input"]["shape"] == ["N", 4, "H", "W"] and facts["input"]["colours"] is None
    assert facts["range16"] == range16
    assert np.allclose(facts["normalisation"]["mean"], [255 * value for value in mean])
    program = torch.export.load(tmp_path / "n.pt2").module()
    logits = program(torch.from_numpy(image.copy()).permute(2, 0, 1)[None].float())
    assert (logits.argmax(dim=1)[0].numpy() == expected).mean() > 0.99

    other_root = infrared(tmp_path / "other", {"train": 2, "val": 1})
    dark = np.full((*SIZE, 4), 20_000, np.uint16) + image * np.uint16(9)
    cv2.imwrite(str(other_root / "val" / "images" / "0.png"), dark)
    capsys.readouterr()
    evaluate(checked("eval", f"checkpoint={run}", f"data.root={other_root}", "device=cpu", "workers=0"))
    printed = " ".join(capsys.readouterr().out.split())
    assert "16-bit images of val use 1 of the 256 levels" in printed
    assert "have up to 100% of an image's pixels out" in printed
    keys = (f"data.root={other_root}", *KEYS, f"run_dir={tmp_path / 'tuned'}", "trainer.steps=1", f"init.weights={run}")
    for resumed in ((), ("resume=auto",)):
        tuned = train(checked("train_seg", *keys, *resumed))["config"]["data"]
        assert (tuned["mean"], tuned["std"]) == (mean, std)  # of the weights, not of these images
    printed = " ".join((tmp_path / "tuned" / "log.txt").read_text().split())
    assert f"trained on images with data.range16={range16}; this run has data.range16=[0, 65535]" in printed


@pytest.mark.parametrize(
    "keys, message",
    [
        (("data.channels=0",), r"data.channels=0: expected a whole number, 1 or more, at most 64"),
        (("data.channels=4", "data.mean=[0.5,0.5,0.5]"), r"data.mean=\[.*\]: expected 4 numbers, as data.channels=4"),
        (("data.channels=2", "data.shown=[1,2,3]"), r"data.shown=.*: expected one or three of the channels 1 to 2"),
        (("data.channels=5", "data.shown=[1,2]"), r"data.shown=\[1, 2\]: expected one or three of the channels 1 to 5"),
        (("data.channels=4", "data.colour_jitter.hue=0.1"), r"data.colour_jitter with data.channels=4: it changes red"),
    ],
)
def test_keys_that_do_not_fit_the_channels_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        checked("train_seg", "data=folder", "data.root=DIR", *keys)


@pytest.mark.parametrize("entry, data", [("train_seg", "camvid"), ("train_imagenet", "image_folder")])
def test_other_data_have_three_channels(entry, data):
    with pytest.raises(ValueError, match=r"data\.channels"):
        checked(entry, f"data={data}", "data.root=DIR", "data.channels=4")
