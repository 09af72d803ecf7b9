"""Released files: names, values, scales and layouts, compared with an independent reference; what is refused."""

import copy
import hashlib
import re
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from keepless import ABN, InPlaceABN
from models import bodies
from models.checkpoints import released_files
from models.checkpoints.loading import load_by_name
from models.checkpoints.recognition import architecture_of
from models.checkpoints.released import load_released, to_standard_bn
from models.heads import DeepLabV3
from models.segmentation import SegmentationNetwork
from tests import released_files as files
from tests.bodies import SMALL_BODIES, small_resnet, small_resnet_basic, small_resnext, small_wider, small_wider_a2
from tests.released_files import IMAGES, Released
from tests.runs import same, without_counts

FULL = {
    "resnext101": ("resnext", dict(structure=[3, 4, 23, 3], base=[128, 128, 256], groups=64, channels=64)),
    "resnext152": ("resnext", dict(structure=[3, 8, 36, 3], base=[128, 128, 256], groups=64, channels=64)),
    "densenet264": ("densenet", dict(structure=[6, 12, 64, 48], growth=32, channels=64)),
    "resnet34": ("resnet", dict(structure=[3, 4, 6, 3], base=[64, 64], channels=64)),
    "resnet50": ("resnet", dict(structure=[3, 4, 6, 3], base=[64, 64, 256], channels=64)),
    "resnet101": ("resnet", dict(structure=[3, 4, 23, 3], base=[64, 64, 256], channels=64)),
}
WIDTHS = [[128, 128], [256, 256], [512, 512], [512, 1024], [512, 1024, 2048], [1024, 2048, 4096]]
FULL["wider_resnet38"] = ("wider", dict(structure=[3, 3, 6, 3, 1, 1], widths=WIDTHS, channels=64))
FULL["wider_resnet38_a2"] = ("wider", {**FULL["wider_resnet38"][1], "a2": 8})
OUR_NAMES = {"widths": "channels", "channels": "stem_channels", "base": "base_channels"}


@pytest.mark.table
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("resnext152", "densenet264"))) for name in FULL],
)
def test_names_and_shapes_of_the_released_networks(name):
    """Every tensor of ours but the counts is in the file, and no other. The architecture is read off the file."""
    kind, options = FULL[name]
    released = Released(device="meta")
    features = getattr(released, kind)(torch.empty(1, 3, 64, 64, dtype=torch.float64, device="meta"), **options)
    released.classified(features, 1000)
    with torch.device("meta"):
        network = getattr(bodies, name)(classes=1000)
    shapes = {key: tensor.shape for key, tensor in without_counts(network.state_dict()).items()}
    assert shapes == {key: tensor.shape for key, tensor in released.tensors.items()}

    architecture = architecture_of(released.tensors)
    assert (architecture.kind, architecture.classes) == ("wider_resnet" if kind == "wider" else kind, 1000)
    expected = {OUR_NAMES.get(key, key): value for key, value in options.items() if key != "a2"}
    expected |= {"resnet": {"groups": 1}, "densenet": {"stem_norm": False}}.get(kind, {})
    assert {key: value for key, value in architecture.options.items() if key != "stem"} == expected
    assert architecture.options.get("stem") == {"wider": None, "resnet": "7x7"}.get(kind, "3x3")


@pytest.mark.parametrize(
    "name, weight, problem",
    [
        ("mod2.block1.convs.conv2.weight", None, "'mod2.block1.convs.conv2.weight' is missing"),
        ("mod2.block1.convs.conv2.weight", torch.zeros(8), "a weight has an odd shape"),
        ("mod2.block1.convs.conv2.weight", torch.zeros(8, 0, 3, 3), "a weight has an odd shape"),
        ("mod2.block1.convs.conv1.weight", torch.zeros(()), "a weight has an odd shape"),
        ("classifier.fc.weight", torch.zeros(()), "a weight has an odd shape"),
    ],
)
def test_tensors_of_no_network_of_the_release_are_refused(name, weight, problem):
    tensors = {**small_resnext(classes=3).state_dict(), name: weight}
    if weight is None:
        del tensors[name]
    with pytest.raises(ValueError, match=rf"^no body has its tensors \({problem}\)$"):
        architecture_of(tensors)


NETWORKS = {
    "resnext": (small_resnext, Released.resnext, {}),
    "resnext 7x7": (partial(small_resnext, stem="7x7"), Released.resnext, dict(stem="7x7")),
    "resnet": (small_resnet, Released.resnet, {}),
    "resnet basic": (small_resnet_basic, Released.resnet, dict(structure=(1, 2, 1, 1), base=(8, 8), channels=8)),
    "densenet": (SMALL_BODIES["densenet"], Released.densenet, {}),
    "wider": (small_wider, Released.wider, files.WIDER),
    "wider a2": (small_wider_a2, Released.wider, files.WIDER | {"a2": 32}),
    "wider a2, dilated": (partial(small_wider_a2, output_stride=8), Released.wider, files.WIDER | {"a2": 8}),
}


@pytest.mark.parametrize("name, scale", [*((name, "released") for name in NETWORKS), ("resnext", "raw")])
@torch.no_grad()
def test_released_networks_compute_what_their_description_says(tmp_path, name, scale):
    """Compared in float64; the files hold positive and negative scales."""
    build, describe, options = NETWORKS[name]
    released = Released(plain=scale == "raw")
    expected = released.classified(describe(released, IMAGES, **options), 3)
    path = files.write_classifier(tmp_path / "net.pth.tar", released.tensors)
    for norm in (InPlaceABN, ABN):
        network = build(norm_act=norm, classes=3).double()
        report = load_released(network, path, scale)
        torch.testing.assert_close(network.eval()(IMAGES), expected, rtol=1e-9, atol=1e-9)
        assert report.matched == list(released.tensors) and not report.skipped
        assert all(new.endswith("num_batches_tracked") for new in report.new)


@torch.no_grad()
def test_the_segmentation_network_with_the_sliding_window(tmp_path):
    """The head on a map larger than the window of 84 cells, and the whole network, stretched, on a smaller one."""
    images, large = torch.randn(1, 3, 93, 117, dtype=torch.float64), torch.randn(1, 16, 87, 90, dtype=torch.float64)
    body, head, cls = (Released(seed=seed) for seed in range(3))
    features = body.wider(images, **files.WIDER, a2=8)
    expected = cls.cls(head.head(features, 4, 6, window=84), 65)
    path = files.write_segmenter(tmp_path / "vistas.pth.tar", body, head, cls)
    windowed = DeepLabV3(16, 4, out_channels=6, pooling_size=(84, 84))
    network = SegmentationNetwork(small_wider_a2(output_stride=8), windowed, 65).double()
    report = load_released(network, path)
    stretched = F.interpolate(expected, images.shape[2:], mode="bilinear")  # as the release does
    torch.testing.assert_close(network.eval()(images, "stretched"), stretched, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(network(images), stretched, rtol=0.1)
    windowed = head.head(large, 4, 6, window=84)
    torch.testing.assert_close(network.head(large), windowed, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(windowed, head.head(large, 4, 6))
    assert len(report.matched) == len(body.tensors) + len(head.tensors) + 2 and not report.skipped


def old(name: str) -> str:
    """The name in very old files, where the tensors of a norm were one level below."""
    return re.sub(r"(^|\.)(bn|bn_out|proj_bn|bn[123])\.(?=\w+$)", r"\1\2.bn.", name)


@pytest.mark.parametrize("name", ["resnet", "densenet"])
def test_layouts_of_all_ages_give_the_same_weights(tmp_path, name):
    build, describe, options = NETWORKS[name]
    released, network = Released(), build(classes=3).double()
    released.classified(describe(released, IMAGES, **options), 3)
    load_released(network, files.write_classifier(tmp_path / "net.pth.tar", released.tensors))
    renamed = {old(key): tensor for key, tensor in released.tensors.items()}
    assert renamed.keys() != released.tensors.keys()
    for tensors, prefix, zipped in (
        *((renamed, "module.", False), (renamed, "", True), (released.tensors, "", False)),
        (released.tensors, "module._orig_mod.", True),
    ):
        loaded = build(classes=3).double()
        report = load_released(loaded, files.write_classifier(tmp_path / "other.pth.tar", tensors, prefix, zipped))
        assert same(network.state_dict(), loaded.state_dict())
        assert any("without _orig_mod., which" in remark for remark in report.remarks) == ("_orig_mod" in prefix)


@pytest.fixture
def file(tmp_path) -> Path:
    return files.small_resnext(tmp_path / "net.pth.tar")[0]


@pytest.mark.parametrize("norm, scale, wrong_scale", [("std", "raw", "released"), ("inplace", "released", "raw")])
def test_the_md5_of_a_released_file_decides_the_scale(file, monkeypatch, norm, scale, wrong_scale):
    with_scale, by_md5 = small_resnext(classes=3), small_resnext(classes=3)
    assert f"({scale}): as scale says" in str(load_released(with_scale, file, scale))
    md5 = hashlib.md5(file.read_bytes()).hexdigest()
    entry = released_files.ReleasedFile("a net", md5, norm, "imagenet", {"224": (77.0, 93.5)})
    monkeypatch.setattr(released_files, "RELEASED_FILES", (*released_files.RELEASED_FILES, entry))
    report = load_released(by_md5, file)
    assert f"({scale}): it is the released a net, norm {norm}: ImageNet top-1/top-5 224 77.00/93.50" in str(report)
    assert same(with_scale.state_dict(), by_md5.state_dict())
    with pytest.raises(ValueError, match=f"scale={wrong_scale} is wrong for .*released.*or give scale={scale}"):
        load_released(by_md5, file, wrong_scale)


def test_the_report_says_which_scale_was_taken_for_other_files(tmp_path, file):
    network = small_resnext(classes=3)
    report = load_released(network, file)
    assert r"|weight| + eps (released): the default for other files" in str(report)
    with pytest.raises(ValueError, match="scale=plain: expected one of released, raw"):
        load_released(network, file, "plain")
    counted = files.write_classifier(tmp_path / "counted.pth.tar", network.state_dict())
    with pytest.raises(ValueError, match="num_batches_tracked.*lack: give scale=raw"):
        load_released(network, counted)
    load_released(network, counted, "raw")


@pytest.mark.parametrize(
    "build, message",
    [
        (partial(small_resnext, stem="7x7"), "The file holds resnext(structure=[1, 2, 2, 1], stem_channels="),
        (partial(small_resnext, structure=(1, 2, 3, 1), groups=1), "stem=3x3, groups=2)"),
    ],
)
def test_a_network_that_does_not_fit_is_told_its_options(file, build, message):
    network = build(classes=3)
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(ValueError) as error:
        load_released(network, file)
    assert f"{file} does not fit the network" in str(error.value) and message in str(error.value)
    assert same(network.state_dict(), before)


def test_a_classifier_that_the_network_has_not_is_skipped_and_named(file):
    for classes, reason in ((0, "the network has no such classifier"), (5, "for 3 classes: expected 5")):
        assert set(load_released(small_resnext(classes=classes), file).skipped.values()) == {reason}


def zipped(path: Path, members: tuple[str, ...]) -> None:
    with zipfile.ZipFile(path, "w") as program:
        for member in members:
            program.writestr(f"net/{member}", "pt2")


FOREIGN = {
    "empty": (lambda path: path.write_bytes(b""), r"is damaged, or no file of torch.save \(EOFError; begins with b''"),
    # In the old format; tests/engine/checkpoint/test_files.py has files of the new one.
    "cut": (lambda path: path.write_bytes(files.small_resnext(path)[0].read_bytes()[:-100]), "is damaged, or no file"),
    "script": (partial(zipped, members=("code/net.py", "constants.pkl")), "is a program of TorchScript, not a checkp"),
    "global": (lambda path: torch.save({"best_prec1": path}, path), r"\(pathlib.*Path\).*weights_only=False"),
    "missing": (lambda path: None, "does not exist: expected .*not unpacked, although it is called .pth.tar"),
    "torchvision": (lambda path: torch.save({"conv1.weight": torch.zeros(64)}, path), "not of a network of the rel"),
    "numbers": (lambda path: torch.save({"epoch": 1, "loss": 2}, path), "not have the layout .* found epoch, loss"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_named_for_what_they_are(tmp_path, kind):
    write, message = FOREIGN[kind]
    path = tmp_path / "net.pth.tar"
    write(path)
    with pytest.raises(ValueError, match=message) as error:
        load_released(small_resnext(classes=3), path)
    assert str(path) in str(error.value)


def test_weights_that_are_not_finite_are_refused():
    state = small_resnext(classes=3).state_dict()
    name = next(name for name in state if name.endswith("weight"))
    state[name] = torch.full_like(state[name], torch.nan)
    with pytest.raises(ValueError, match=f"has infinite or NaN weights: {name}. It was saved after an overflow"):
        load_by_name(small_resnext(classes=3), state, source="", name="", advice="")


def test_a_state_dict_with_standard_norms_computes_the_same():
    """PyTorch's own norms load it, strictly; a fixed scale becomes a weight of ones."""
    for options in ({}, {"learn_scale": False}):
        layer = nn.Sequential(nn.Conv2d(3, 4, 1), InPlaceABN(4, activation="identity", **options)).eval()
        if not options:
            layer[1].weight.data = torch.tensor([-2.0, 0.0, 1e-6, 3.0])
        layer[1].running_mean.uniform_(-1, 1)
        standard = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
        standard.load_state_dict(to_standard_bn(layer.state_dict()))
        x = torch.randn(2, 3, 5, 5)
        torch.testing.assert_close(standard(x), layer(x))
