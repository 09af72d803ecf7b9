"""From people's own images and masks to predictions and an exported network, by the commands of docs/tour.md."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from datasets.camvid import camvid_classes
from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.segmentation import cross_entropy
from engine.training import planner
from eval import evaluate
from scripts import plan_memory
from scripts.browse_data import browse
from scripts.export import export
from scripts.make_classes import make_classes
from scripts.predict import predict
from scripts.reports.markdown import unfolded
from scripts.verify_data import verify_data
from tests import trees
from tests.datasets import classification_trees
from tests.runs import REPOSITORY, checked, classification_config, run_config, same
from tests.test_commands import BLOCK
from train_seg import train

TOUR = REPOSITORY / "docs" / "tour.md"
SMALL = (
    *("data.crop_size=32", "data.workers=0", "debug=smoke", "trainer.device=cpu", "norm.backend=eager"),
    "trainer.precision=float32",  # bfloat16 takes minutes where a processor emulates it
)
COMMANDS = {  # and keys that make them short
    "make_classes": (make_classes, "workers=0"),
    "verify_data": (verify_data, "workers=0"),
    "browse_data": (browse, "data.crop_size=32", "data.crops_per_minibatch=2", "data.workers=0", "count=2"),
    "train_seg": (train, *SMALL),
    "eval": (evaluate, "device=cpu", "workers=0"),
    "predict": (predict, "device=cpu"),
    "export": (export,),
}


def under_other_names(camvid: Path, root: Path) -> None:
    """CamVid's images and labels in folders of their own, in the same order."""
    for number, image in enumerate(sorted(camvid.glob("*/images/*"))):
        label, split = image.parents[1] / "labels" / f"{image.stem}.png", image.parents[1].name
        for file, kind in ((image, "images"), (label, "labels")):
            target = root / split / kind / f"tour {number // 4:03d}" / f"{number}{file.suffix}".rjust(9, "0")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


def walk(folder: Path) -> list[tuple[str, list[str], bool]]:
    """The commands of the walk, their keys with paths in `folder`, and whether the text says that one resumes."""
    commands = []
    for language, block in BLOCK.findall(unfolded(TOUR.read_text())):
        for line in () if language else block.splitlines():
            words = shlex.split(line, comments=True)
            if words[0] == "python" and words[1] != "-c" and "# instead" not in line:  # not TensorBoard
                name = words[2 if words[1] == "-m" else 1].removeprefix("scripts.").removesuffix(".py")
                keys = [re.sub(r"=([A-Z]+)\b", rf"={folder}/\1", word) for word in words if "=" in word]
                commands.append((name, keys, "resume=auto" in line))
    return commands


@pytest.mark.slow("many commands")
def test_every_command_of_the_tour(tmp_path, capsys):
    """CamVid's files under other names train and evaluate as data=camvid does, to the digit."""
    camvid, root = trees.camvid_folders(tmp_path / "camvid"), tmp_path / "DIR"
    under_other_names(camvid, root)
    shutil.copytree(root / "test" / "images", tmp_path / "IMAGES")
    torch.save(timm.create_model("tf_efficientnet_lite0").state_dict(), tmp_path / "LITE")
    results = []
    for name, keys, resumes in walk(tmp_path):
        if name == "plan_memory":
            plan_memory.plan(checked("train_seg", *keys, *SMALL, "memory.fit=null"))
            continue
        command, *options = COMMANDS[name]
        results.append(command(checked(name, *dict.fromkeys((*keys, *options)))))
        if resumes:
            again = train(checked(name, *keys, *SMALL, "resume=auto"))
            assert again["confusion_matrix"] == results[-1]["confusion_matrix"]
        if name == "make_classes":
            rows = json.loads((root / "classes.json").read_text())["classes"]
            count = 11 if "ignored=11" in keys else 12
            assert [entry["name"] for entry in rows] == [f"class_{number}" for number in range(count)]
            names = [*camvid_classes().names, "unlabelled"]
            named = {"classes": [{"name": name} for name in names], "ignored": [11]}
            (root / "classes.json").write_text(json.dumps(named))
    _, _, verified, pages, tried, tuned, trained, evaluated, predicted, *_ = results
    assert {split: report.problems for split, report in verified.items()} == {"train": {}, "val": {}, "test": {}}
    assert len(pages) == 1 and len(predicted) == 2 and (tmp_path / "PICTURES").is_dir()
    assert "data:image" in (tmp_path / "REPORT.html").read_text()
    kinds = {folder.name for folder in (tmp_path / "PREDICTED").iterdir() if [*folder.rglob("*.png")]}
    assert kinds == {"ids", "colour", "overlays"} and tried["config"]["trainer"]["steps"] == 2
    assert evaluated["confusion_matrix"] == tuned["confusion_matrix"] and evaluated["dataset"] == "folder"
    assert "crops of 32x32 pixels on one device" in capsys.readouterr().out

    run = f"run_dir={tmp_path / 'official'}"
    official = train(checked("train_seg", "data=camvid", f"data.root={camvid}", run, *SMALL))
    for part in ("miou", "iou", "pixel_accuracy", "confusion_matrix", "images"):
        assert trained[part] == official[part], part
    states = [checkpoint.load(tmp_path / run / "checkpoints" / "last.pt") for run in ("SCRATCH", "official", "RUN")]
    assert same(*(state["network"] for state in states[:2])) and states[0]["classes"] == states[1]["classes"]
    assert states[2]["config"]["body"]["network"] == "tf_efficientnet_lite0"
    *_, code = re.findall(r"```python\n(.*?)```", TOUR.read_text(), re.DOTALL)
    command = [sys.executable, "-I", "-W", "ignore", "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0 and "'sky': '" in ended.stdout, ended.stderr


def test_rare_classes_weigh_more_and_doubtful_data_is_named(tmp_path, monkeypatch):
    root = trees.folder(tmp_path / "boards")
    classes = [*trees.FOLDER["classes"], {"name": "knot"}]
    (root / "classes.json").write_text(json.dumps({**trees.FOLDER, "classes": classes}))
    keys = ("data=folder", f"data.root={root}", "data.train_split=[train,val]", "loss.class_weights=frequency", *SMALL)
    keys += ("sampler=class_uniform",)
    losses = Mock(wraps=cross_entropy.CrossEntropy)
    monkeypatch.setattr(cross_entropy, "CrossEntropy", losses)
    weighted = train(checked("train_seg", f"run_dir={tmp_path / 'weighted'}", *keys))
    log = (tmp_path / "weighted" / "log.txt").read_text()
    assert "no training image shows knot" in log and "data.val_split=val: 2 of its images are trained on" in log
    assert log.count("1 of 4 classes have no pixel in the training split and are not drawn: knot") == 1
    assert weighted["config"]["data"]["train_split"] == ["train", "val"]
    *weights, of_knot = losses.call_args_list[0].kwargs["weights"].tolist()
    assert len({*weights}) == 3 and min(weights) > 0 == of_knot


def test_own_images_are_planned_from_their_files(tmp_path):
    root = trees.folder(tmp_path / "boards")
    with pytest.raises(ValueError, match="own, give data=folder."):
        assemble.dataset(run_config("run_dir=unused", "data=synthetic", f"data.root={root}").data, "train", draw=True)
    data = run_config("run_dir=unused", "data=folder", f"data.root={root}", "data.train_split=[train,val]").data
    assert (planner.classes_of(data), planner.training_images(data)) == (3, 8)
    camvid = run_config("run_dir=unused", "data=camvid", "data.train_split=[train,val]").data
    assert planner.training_images(camvid) == 468
    root = classification_trees.imagenet(tmp_path / "flowers")
    config = classification_config("run_dir=unused", "data=image_folder", f"data.root={root}")
    assert (planner.classes_of(config.data), planner.training_images(config.data)) == (3, 6)
    (root / "val").rename(root / "test")
    reports = verify_data(checked("verify_data", "data=image_folder", f"data.root={root}", "workers=0"))
    assert [(report.images, report.problems) for report in reports.values()] == [(6, {}), (3, {})]


def test_rectangular_crops_are_planned_with_their_width():
    config = run_config("run_dir=unused", "data.crop_aspect=1.5", "norm.backend=eager")
    with planner.FakeTensors():
        _, _, minibatch, _ = planner.fake_step(config, 2, 64)
    assert minibatch["image"].shape == (2, 3, 64, 96) and minibatch["label"].shape == (2, 64, 96)
    assert planner.crop_text(config.data, 64) == "64x96"
    assert np.prod(config.data.crop()) == 128 * 192


@pytest.mark.parametrize("kind", ["jpeg", "coco", "labelme"])
def test_the_page_s_programs_make_labels_of_other_kinds(kind, tmp_path, monkeypatch):
    page = (REPOSITORY / "docs" / "data.md").read_text()
    code = re.search(rf"<!-- {kind} start -->\n```python\n(.*?)```", page, re.DOTALL)[1]
    assert len(code.splitlines()) < 20 and "### Labels of other kinds" in page
    monkeypatch.chdir(tmp_path)
    square = [[2, 3], [9, 3], [9, 8], [2, 8]]
    expected = np.zeros((12, 16), np.uint8)
    expected[3:9, 2:10] = 2
    for folder in ("masks/a", "json/a"):
        (tmp_path / folder).mkdir(parents=True)
    Image.fromarray(np.array([0, 128, 255], np.uint8)[expected]).save("masks/a/b.jpg", quality=100)
    shape = {"shape_type": "polygon", "label": "stem", "points": square}
    (tmp_path / "json/a/b.json").write_text(json.dumps({"imageWidth": 16, "imageHeight": 12, "shapes": [shape]}))
    entry = {"image_id": 7, "category_id": 44, "segmentation": [[value for point in square for value in point]]}
    image = {"id": 7, "file_name": "a/b.jpg", "width": 16, "height": 12}
    content = {"images": [image], "categories": [{"id": 1}, {"id": 44}], "annotations": [entry]}
    (tmp_path / "instances.json").write_text(json.dumps(content))
    exec(code, {})
    assert np.array_equal(np.array(Image.open("labels/a/b.png")), expected)
