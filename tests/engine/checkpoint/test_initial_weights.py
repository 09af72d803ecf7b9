"""Fine-tuning: loaded tensors are exactly the file's, others are listed, and misfits are refused."""

import copy
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torchvision
from torch import nn

from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.checkpoint import initial_weights
from engine.checkpoint.initial_weights import check_exists, initialise, normalisation_of
from engine.configuration import config as cfg
from engine.schema.classification import ClassFoldersData
from engine.schema.data import Data
from engine.schema.network import InPlaceNorm, ReleasedNorm
from engine.schema.training import Init, TrainingRun
from keepless import ABN
from models.bodies import LibraryBody, resnext101
from models.checkpoints.loading import listed, state_dict_in, unwrapped
from models.checkpoints.released import load_released
from tests import released_files
from tests.checkpoints import saved
from tests.runs import classification_config, run_config, same, without_counts

CLASSES = ("road", "sky", "tree")

PARTS = ("body", "head", "cls")
MANY = [f"criterion.{number}" for number in range(999)]  # more than the network has
EMA = [f"ema.module.{name}" for name in ("body.mod1.conv1.weight", "cls.weight", "cls.bias")]


def network(*overrides: str, classes: int = 3, seed: int = 0):
    """A small network with statistics and scales unlike any initialisation's."""
    torch.manual_seed(seed)
    built = assemble.network_of(run_config(*overrides), classes)
    for module in built.modules():
        if isinstance(module, ABN):
            for values in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(values)
    return built


def initialise_from(network, path, classes, package: bool = False, **options):
    """`initialise` by the keys of `init` and the norm alone."""
    norm = (ReleasedNorm if package else InPlaceNorm)(activation="leaky_relu")
    return initialise(SimpleNamespace(init=Init(str(path), **options), norm=norm, data=Data()), network, classes)


def tuned_from(file, *overrides: str, classes=CLASSES, seed: int = 0, **options):
    """A network that starts from a file, and the report."""
    tuned = network(*overrides, classes=len(classes), seed=seed)
    return tuned, initialise_from(tuned, file, classes, **options)


def started(config: TrainingRun):
    """The network of a run with `init.weights`, and the report."""
    tuned = assemble.network_of(config, len(CLASSES))
    return tuned, initialise(config, tuned, CLASSES)


def write(path, trained, *overrides: str, classes=CLASSES, **parts) -> None:
    config = cfg.plain(run_config(*overrides))
    state = {"task": "segmentation", "step": 5, "config": config, "classes": list(classes)}
    checkpoint.save(path, {**state, "network": trained.state_dict(), **parts})


@pytest.fixture(scope="module")
def trained():
    return network("norm=std", seed=1)


@pytest.fixture
def file(tmp_path, trained):
    write(tmp_path / "last.pt", trained, "norm=std")
    return tmp_path / "last.pt"


def test_a_checkpoint_means_the_same_in_every_norm(file, trained):
    """tests/keepless/norms/test_abn.py has the other norms' names and functions."""
    tuned, report = tuned_from(file, "norm=inplace")
    assert same(tuned.state_dict(), trained.state_dict())
    assert (report.matched, report.skipped, report.new) == (list(trained.state_dict()), {}, [])
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(tuned.eval()(images), trained.eval()(images))
    assert str(report) == f"starts from {file}, step 5: {len(report.matched)} tensors matched, 0 skipped, 0 new"
    averaged = {name: tensor + 1 for name, tensor in trained.state_dict().items()}
    write(file, trained, "norm=std", ema=averaged)  # preferred
    tuned, report = tuned_from(file, "norm=inplace")
    assert same(tuned.state_dict(), averaged) and "step 5, EMA weights" in str(report)


@pytest.mark.parametrize(
    "classes, reason",
    [
        (("road", "sky"), "for 3 classes: expected 2"),
        (("road", "tree", "sky"), "for other classes, such as sky in place of tree"),
    ],
)
def test_a_classifier_of_other_classes_starts_anew_and_says_so(file, trained, classes, reason):
    tuned, report = tuned_from(file, classes=classes)
    for part, expected in (("cls", network(classes=len(classes))), ("body", trained), ("head", trained)):
        assert same(getattr(tuned, part).state_dict(), getattr(expected, part).state_dict())
    assert report.skipped == {"cls.weight": reason, "cls.bias": reason} and report.new == ["cls.weight", "cls.bias"]
    assert f"skipped cls.weight, cls.bias: {reason}" in str(report) and "new cls.weight, cls.bias" in str(report)


def test_a_file_without_names_gives_its_classifier_only_if_the_order_is_beyond_doubt(tmp_path):
    config = classification_config("body=resnext_cifar_small")
    torch.save(assemble.network_of(config, 3).state_dict(), tmp_path / "net.pt")
    data, norm, tuned = ClassFoldersData(name="imagenet"), InPlaceNorm(activation="leaky_relu"), None

    def initialised(*classes: str, **options) -> bool:
        """Whether the classifier is loaded, and so the report says that its classes are not known."""
        nonlocal tuned
        tuned = assemble.network_of(config, 3)
        init = Init(str(tmp_path / "net.pt"), format="standard_bn", **options)
        report = initialise(Namespace(init=init, norm=norm, data=data), tuned, classes)
        is_loaded = "classifier.fc.weight" in report.matched
        assert ("only their number was compared" in str(report)) == is_loaded
        return is_loaded

    assert initialised("1", "2", "3") and initialised("1", "2", "10") and initialised("cat", "dog", "owl")
    assert not initialised("1", "10", "2", part="body")
    with pytest.raises(ValueError, match="^init.weights=.*net.pt does not name its 3 .* 1, 10, 2 as text, 1, 2, 10 "):
        initialised("1", "10", "2")
    assert not same(tuned.state_dict(), torch.load(tmp_path / "net.pt"))  # unchanged
    data.class_order = "text"
    assert initialised("1", "10", "2")


def test_the_body_alone(file, trained):
    """It may come from a whole network, even with another head."""
    tuned, report = tuned_from(file, "head.hidden_channels=24", part="body")
    assert same(tuned.body.state_dict(), trained.body.state_dict())
    assert same(tuned.head.state_dict(), network("head.hidden_channels=24").head.state_dict())
    assert set(report.skipped.values()) == {"init.part=body"}
    assert {name.split(".")[0] for name in report.new} == {"head", "cls"}


@pytest.mark.parametrize("part, prefix", [("network", ""), ("body", "body.")])
def test_the_body_of_a_checkpoint_of_another_task(tmp_path, trained, prefix, part):
    """It has more classes than a segmentation can have, and its own keys; its classifier is skipped."""
    config = cfg.plain(classification_config("norm=std", "norm.activation=leaky_relu"))
    classifier = {**trained.body.state_dict(), "classifier.fc.weight": torch.zeros(1000, 4)}
    tensors = {f"{prefix}{name}": tensor for name, tensor in classifier.items()}
    parts = {"config": config, "network": tensors, "task": "classification"}
    write(tmp_path / "last.pt", trained, classes=[f"class {i}" for i in range(1000)], **parts)
    tuned, report = tuned_from(tmp_path / "last.pt", part=part)
    body = {f"body.{name}": tensor for name, tensor in trained.body.state_dict().items()}
    assert same(tuned.state_dict(), network().state_dict() | body)
    assert report.skipped == {"body.classifier.fc.weight": "it classifies whole images"}
    assert report.matched == [*body] and report.new == [name for name in tuned.state_dict() if name not in body]


@pytest.mark.parametrize(
    "prefix, inside, prefixes, zipped",
    [
        ("", "", "", True),
        ("module.", "", "module.", False),
        ("_orig_mod.", "", "_orig_mod.", True),
        ("model.net.", "", "model.net.", True),
        ("0.", "", "0.", True),
        ("model.", "_orig_mod.", "_orig_mod., model.", True),
        ("", "_checkpoint_wrapped_module.", "_checkpoint_wrapped_module.", True),
    ],
)
def test_a_state_dict_of_standard_batch_normalisation(tmp_path, trained, prefix, inside, prefixes, zipped):
    """Other programs write it below "state_dict", from wrappers, without counters, or in the old format."""
    tensors = without_counts(trained.state_dict())
    if prefix or inside:
        renamed = {prefix + name.replace(".", f".{inside}", 1): tensor for name, tensor in tensors.items()}
        tensors = {"epoch": 3, "state_dict": renamed | {"n_averaged": torch.tensor(7)}}
    torch.save(tensors, tmp_path / "net.pth", _use_new_zipfile_serialization=zipped)
    tuned, report = tuned_from(tmp_path / "net.pth", format="standard_bn")
    assert same(without_counts(tuned.state_dict()), without_counts(trained.state_dict()))
    assert all(name.endswith("num_batches_tracked") for name in report.new) and not report.skipped
    remarks = [remark for remark in report.remarks if remark.startswith("names without")]
    assert remarks == [f"names without {prefixes}, which other programs add"] * bool(prefixes)
    with pytest.raises(ValueError, match="net.pth is not a checkpoint of this project: give init.format=standard_bn"):
        initialise_from(tuned, tmp_path / "net.pth", CLASSES)


def test_a_body_of_another_program_is_found_beside_its_other_tensors(tmp_path, trained):
    """Contrastive training leaves an encoder and a projector."""
    tensors = {f"encoder.{name}": tensor for name, tensor in without_counts(trained.body.state_dict()).items()}
    torch.save({**tensors, "projector.weight": torch.ones(3)}, tmp_path / "net.pth")
    tuned, report = tuned_from(tmp_path / "net.pth", format="standard_bn", part="body")
    assert same(without_counts(tuned.body.state_dict()), without_counts(trained.body.state_dict()))
    assert "skipped projector.weight: not below encoder" in report.remarks


@pytest.mark.parametrize("skipped_names", [MANY, ["ema.n_averaged", *EMA], ["body.weight", "heads.weight"]])
def test_tensors_beside_the_network_s_are_skipped_and_said(trained, skipped_names):
    """Lightning's checkpoints may hold a loss's weights and averaged weights."""
    tensors = {f"model.{name}": tensor for name, tensor in trained.state_dict().items()}
    matched, remarks = unwrapped(tensors | dict.fromkeys(skipped_names, torch.ones(3)), PARTS)
    assert same(matched, trained.state_dict())
    skipped = [name.replace("module.", "") for name in skipped_names if name != "ema.n_averaged"]
    assert f"skipped {listed(skipped)}: not below model" in remarks


def averaged_files(raw: dict, average: dict) -> dict[str, dict]:
    """Checkpoints with raw and EMA weights, as other programs write them."""
    below = {f"module.{name}": tensor for name, tensor in average.items()}
    counted = below | {"n_averaged": torch.tensor(7)}
    of_lightning = {f"model.{name}": tensor for name, tensor in raw.items()}
    return {
        "timm": {"state_dict": raw, "state_dict_ema": average, "arch": "resnet18"},
        "timm in parallel": {
            "state_dict": {f"module.{name}": tensor for name, tensor in raw.items()},
            "state_dict_ema": below,
        },
        "torchvision": {"model": raw, "optimizer": {"state": {}}, "model_ema": counted},
        "nested": {"model": raw, "ema": {"module": average, "updates": 9}},
        "average alone": {"params_ema": average},
        "mmengine": {
            "state_dict": average,
            "ema_state_dict": {f"module.{n}": t for n, t in raw.items()} | {"steps": counted["n_averaged"]},
        },
        "Lightning": {"state_dict": average, "current_model_state": raw},
        "a module of Lightning": {
            "state_dict": of_lightning | {f"ema_model.{name}": tensor for name, tensor in counted.items()}
        },
        "flat": raw | {f"ema.{name}": tensor for name, tensor in average.items()},
    }


def test_averaged_weights_of_other_programs_are_taken_and_said():
    raw = {"body.mod1.conv1.weight": torch.zeros(2), "cls.bias": torch.zeros(3)}
    average = {name: tensor + 1 for name, tensor in raw.items()}
    for program, content in averaged_files(raw, average).items():
        tensors, state_remarks = state_dict_in(content)
        matched, name_remarks = unwrapped(tensors, PARTS)
        assert same(matched, average) and "EMA weights" in str((*state_remarks, *name_remarks)), program


@pytest.mark.parametrize("format, options", [("standard_bn", {}), ("released", {"scale": "raw"})])
def test_averaged_weights_of_every_format_start_a_run(tmp_path, trained, format, options):
    average = {name: tensor + 1 for name, tensor in without_counts(trained.state_dict()).items()}
    torch.save(averaged_files(trained.state_dict(), average)["timm in parallel"], tmp_path / "net.pth")
    tuned, report = tuned_from(tmp_path / "net.pth", format=format, **options)
    assert same(without_counts(tuned.state_dict()), average) and "EMA weights" in str(report)


@pytest.mark.parametrize("has_names", [True, False])
def test_averaged_weights_that_are_incomplete_are_left_out_and_said(trained, has_names):
    """Programs that average parameters alone have no averaged statistics, and some store a list."""
    raw = without_counts(trained.state_dict())
    parameters = {name: tensor + 1 for name, tensor in raw.items() if "running" not in name}
    average = parameters if has_names else {"decay": 0.9, "shadow_params": [*parameters.values()]}
    keys_beside = {"ema": None, "ema_decay": 0.9, "ema_config": {"every": 1}}
    tensors, (remark, *_) = state_dict_in({"model": raw, **keys_beside, "model_ema": average})
    assert same(tensors, raw) and remark.startswith("left out model_ema, EMA weights without ")


def test_the_format_is_never_guessed(file, tmp_path):
    with pytest.raises(ValueError, match="last.pt is a checkpoint of this project: leave init.format out"):
        tuned_from(file, format="standard_bn")
    for content in ([torch.zeros(2)], {"body": {"conv": torch.zeros(2)}}, {"state_dict": [1]}, {0: torch.zeros(2)}):
        torch.save(content, tmp_path / "other.pt")
        with pytest.raises(ValueError, match="other.pt with init.format=standard_bn: expected a state dict"):
            tuned_from(tmp_path / "other.pt", format="standard_bn")
    torch.save({"format": "another/7"}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="format 'another/7': expected"):
        tuned_from(tmp_path / "other.pt")


NARROW_A2 = ("body=wider_resnet38_a2", "body.channels=[[8,8],[8,8],[16,16],[16,16],[8,16,32],[16,32,64]]")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["body.structure=[1,1,1,2]"], "body.mod5.block2.* is not in the file.*Give body=resnext_tiny and.*with"),
        (
            ["body.structure=[1,1,1,1]", "body.base_channels=[64,64,128]"],
            "x.* in the file and .*x.* in the network.*",
        ),
        ([*NARROW_A2], "has no place in the network.* and [0-9]+ more.*with"),
        (["norm.learn_scale=false"], "weight has no place in the network.*norm.learn_scale that it was trained with"),
        (["head.hidden_channels=24"], "x.* in the file and .*with, and its head; or init.part=body for its body alone"),
    ],
)
def test_what_does_not_fit_is_refused_and_named(file, overrides, message):
    tuned = assemble.network_of(run_config(*overrides), 3)
    before = copy.deepcopy(tuned.state_dict())
    with pytest.raises(ValueError, match=f"init.weights={file} does not fit the network.*{message}$"):
        initialise_from(tuned, file, CLASSES)
    assert same(tuned.state_dict(), before)


def test_channels_other_than_three_are_named_if_only_they_do_not_fit(tmp_path):
    write(tmp_path / "last.pt", network("data=folder", "data.channels=4"), "data=folder", "data.channels=4")
    with pytest.raises(ValueError, match="16x4x.* and 16x3.* Give body=resnext_tiny, data.channels=4, and the norm"):
        started(run_config(f"init.weights={tmp_path / 'last.pt'}"))


def test_scales_of_the_released_package_become_ours(tmp_path):
    """Ours are |w| + eps. The package's layers have no counters; it loads its own scales, but cannot load ours."""
    options = ("norm=package", "norm.eps=0.25", "norm.activation=leaky_relu")
    trained = network(seed=1)
    state = without_counts(trained.state_dict())
    scales = {f"{name}.weight" for name, module in trained.named_modules() if isinstance(module, ABN)}
    assert (state["head.red_bn.weight"] < 0).any()
    write(tmp_path / "last.pt", trained, *options, network=state)
    tuned, report = tuned_from(tmp_path / "last.pt")
    for name, tensor in tuned.state_dict().items():
        if name in state:
            assert torch.equal(tensor, state[name].abs() + 0.25 if name in scales else state[name]), name
    assert all(name.endswith("num_batches_tracked") for name in report.new)
    initialise_from(tuned, tmp_path / "last.pt", CLASSES, package=True)
    assert torch.equal(tuned.head.red_bn.weight, state["head.red_bn.weight"])
    write(tmp_path / "ours.pt", trained)
    with pytest.raises(ValueError, match="ours.pt with norm=package.*give norm=inplace"):
        initialise_from(tuned, tmp_path / "ours.pt", CLASSES, package=True)


SMALL_RESNEXT = (
    *("body=resnext101", "body.structure=[1,2,2,1]", "body.base_channels=[4,4,8]", "body.groups=2"),
    "body.stem_channels=4",
)


@pytest.mark.parametrize("scale", ["released", "raw"])
def test_a_released_file_in_one_step(tmp_path, scale):
    """Both tasks get the weights of `load_released`; the scale is not guessed."""
    path, released = released_files.small_resnext(tmp_path / "net.pth.tar")
    by_hand = resnext101(classes=3, structure=(1, 2, 2, 1), base_channels=(4, 4, 8), groups=2, stem_channels=4)
    load_released(by_hand, path, scale)
    start = (f"init.weights={path}", "init.format=released")
    classifier, report = started(classification_config(*SMALL_RESNEXT, *start, f"init.scale={scale}"))
    assert same(classifier.state_dict(), by_hand.state_dict())
    assert not report.skipped and f"({scale}): as init.scale says" in str(report)
    segmenter, report = started(run_config(*SMALL_RESNEXT, *start, f"init.scale={scale}"))
    body = segmenter.body.state_dict()
    assert same(body, {name: tensor for name, tensor in by_hand.state_dict().items() if name in body})
    assert set(report.skipped.values()) == {"it classifies whole images"}
    with pytest.raises(ValueError, match="none of the released files.*give init.scale=released .* init.scale=raw"):
        started(run_config(*SMALL_RESNEXT, *start))
    with pytest.raises(ValueError, match="body.mod1.bn1.weight has no place in the network.* Give the body"):
        tuned_from(path, *SMALL_RESNEXT, "body.stem=7x7", format="released", scale=scale)

    package = dict(format="released", scale=scale, package=True)  # it takes the file's scales unchanged
    if scale == "raw":
        with pytest.raises(ValueError, match="norm=package.*give norm=inplace"):
            tuned_from(path, *SMALL_RESNEXT, **package)
        return
    tuned, _ = tuned_from(path, *SMALL_RESNEXT, **package)
    assert torch.equal(tuned.body.bn_out.weight, released.tensors["bn_out.weight"].float())
    assert (tuned.body.bn_out.weight < 0).any()


@pytest.mark.parametrize("activation, mean, warned", [("relu", "null", False), ("leaky_relu", "[0.5,0.5,0.5]", True)])
def test_a_resnet_of_torchvision(tmp_path, activation, mean, warned):
    torch.save(torchvision.models.resnet18(weights=None).state_dict(), tmp_path / "net.pth")
    start = (f"init.weights={tmp_path / 'net.pth'}", "init.format=torchvision")
    words = ("body=resnet18", "norm=std", f"norm.activation={activation}", f"data.mean={mean}")
    _, report = started(run_config(*words, *start))
    assert {name.partition(".")[0] for name in report.new} == {"head", "cls"}
    assert set(report.skipped.values()) == {"it classifies whole images"}
    assert (f"norm.activation={activation}: the weights were trained with relu" in str(report)) == warned
    assert ("images with data.mean=[0.485, 0.456, 0.406] data.std=[0.229, 0.224, 0.225]; " in str(report)) == warned
    for body in ("body=resnext_tiny", "body=resnet34"):
        with pytest.raises(
            ValueError, match="net.pth does not fit the network.* Give body=resnet18 and the norm.learn"
        ):
            started(run_config(body, "norm=std", *start))
    with pytest.raises(
        ValueError, match=f"init.weights={tmp_path} .*: expected a file of weights, such as .*net.pth, "
    ):
        check_exists(run_config(f"init.weights={tmp_path}").init)


def wrapped(kind: str, state: dict, path: Path) -> Path:
    """A file of a network's tensors as other programs write it."""
    path = path / f"net.{'safetensors' if kind == 'safetensors' else 'pth'}"
    if kind == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(state, path)
    elif kind == "torchvision's scripts":
        torch.save({"model": state, "epoch": 3, "args": Namespace(lr=0.1), "optimizer": {"state": {}}}, path)
    elif kind == "timm's scripts":
        state = {f"module.{name}": tensor for name, tensor in state.items()}
        torch.save({"arch": "resnet18", "state_dict": state, "args": Namespace(lr=0.1)}, path)
    else:
        heads = dict.fromkeys(("classifier.0.convs.0.0.weight", "aux_classifier.0.weight"), torch.zeros(2))
        torch.save({f"backbone.{name}": t for name, t in state.items() if not name.startswith("fc.")} | heads, path)
    return path


@pytest.mark.parametrize(
    "kind",
    ["torchvision's scripts", pytest.param("timm's scripts", marks=pytest.mark.slow), "a DeepLabV3", "safetensors"],
)
@torch.no_grad()
def test_files_as_people_have_them_give_our_and_torchvision_s_network_one_function(tmp_path, kind):
    torch.manual_seed(0)
    library_network = torchvision.models.resnet18(weights=None)
    file, images, outputs = wrapped(kind, library_network.state_dict(), tmp_path), torch.randn(1, 3, 64, 64), []
    keys = {
        "body=resnet18": (f"init.weights={file}", "init.format=timm"),
        "body=torchvision": ("body.network=resnet18", f"body.weights={file}"),
    }
    for body, start in keys.items():
        config = run_config(body, "norm=std", "body.output_stride=32", *start)
        assert (config.init.weights, config.norm.activation) == (str(file), "relu")
        built, report = started(config)
        assert {name.partition(".")[0] for name in report.new} == {"head", "cls"} and len(report.matched) == 120
        assert ("not below backbone" in str(report)) == (kind == "a DeepLabV3")
        outputs.append(built.body.eval()(images))
    features = nn.Sequential(*list(library_network.eval().children())[:-2])(images)
    torch.testing.assert_close(outputs, [features, features], rtol=1e-4, atol=1e-5)


TAGGED, HALF = "resnet34.ra4_e3600_r224_in1k", "[0.5,0.5,0.5]"


@pytest.mark.parametrize(
    "network, mean, stated, doubted, differs",
    [
        ("resnet34", "null", {}, True, False),
        ("resnet34", HALF, {}, False, False),  # the other tag's: the choice is made
        (TAGGED, "null", {}, False, False),
        ("resnet34", "null", {"model": TAGGED}, False, True),  # the file says it
        ("resnet34", "null", {"pretrained_cfg": '{"mean": [0.5, 0.5, 0.5], "std": [1, 1, 1]}'}, False, True),
    ],
)
def test_a_file_of_timm_that_does_not_name_its_tag_is_doubted_if_tags_differ(
    tmp_path, caplog, monkeypatch, network, mean, stated, doubted, differs
):
    """The weights of a network may have been trained on images of several normalisations. (This network is tiny.)"""
    pytest.importorskip("timm")
    monkeypatch.setattr(initial_weights.logger, "propagate", True)
    file, std = tmp_path / "net.safetensors", mean if mean == HALF else "null"
    keys = ("body=timm", f"body.network={network}", f"body.weights={file}", f"data.mean={mean}", f"data.std={std}")
    layers = {"conv": nn.Conv2d(3, 8, 3, padding=1, bias=False), "bn": nn.BatchNorm2d(8), "act": nn.ReLU()}
    body = LibraryBody(make=lambda *_: layers, network=network)
    pytest.importorskip("safetensors.torch").save_file(body.state_dict(), file, stated)
    report = str(initialise(run_config("norm=std", *keys), body, CLASSES))
    assert ("trained on images with data.mean=" in report) == differs
    assert ("net.safetensors does not say which weights of timm it holds" in caplog.text) == doubted


def test_published_weights_are_downloaded_once_or_the_message_says_what_to_fetch(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    config = run_config("body=torchvision", "body.network=resnet18", "body.weights=published", "norm=std")
    monkeypatch.setattr(torch.hub, "download_url_to_file", Mock(side_effect=OSError("no network")))
    with pytest.raises(ValueError, match=r"resnet18-\w+.pth cannot be downloaded \(no network\): .* give the file"):
        started(config)
    fetched, state = [], torchvision.models.resnet18(weights=None).state_dict()

    def succeeds(url: str, path: str) -> None:
        fetched.append(url)
        torch.save(state, path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", succeeds)
    for _ in range(2):
        built, _ = started(config)
    assert len(fetched) == 1 and torch.equal(built.body.conv1.weight, state["conv1.weight"])


def test_a_classifier_from_any_checkpoint(tmp_path, trained):
    """The same classes take everything. A segmentation network gives its body, without a prefix."""
    config = classification_config("body=resnext_cifar_small")
    tuned = assemble.network_of(config, 3)
    saved(tmp_path / "net.pt", config, CLASSES)
    assert not initialise_from(tuned, tmp_path / "net.pt", CLASSES).skipped
    assert same(tuned.state_dict(), checkpoint.load(tmp_path / "net.pt")["network"])
    report = initialise_from(tuned, tmp_path / "net.pt", ("a", "b", "c"))
    assert report.new == ["classifier.fc.weight", "classifier.fc.bias"]

    write(tmp_path / "seg.pt", trained, "norm=std")
    config = classification_config("body=resnext_tiny")
    classifier = assemble.network_of(config, 3)
    report = initialise_from(classifier, tmp_path / "seg.pt", CLASSES)
    body = trained.body.state_dict()
    assert all(torch.equal(classifier.state_dict()[name], tensor) for name, tensor in body.items())
    assert set(report.skipped.values()) == {"it classifies pixels"}


RESNET = ("body=resnet50", "body.structure=[2,2,2,2]", "body.base_channels=[64,64]", "norm=std")
SPREAD: dict[str | None, tuple[str, ...]] = {  # init.format, and the network
    None: (),
    "standard_bn": (),
    "released": (),
    "torchvision": (*RESNET, "norm.activation=relu"),
    "torchvision's own": ("body=torchvision", "body.network=resnet18", "norm=std"),
    "timm": ("body=timm", "body.network=resnet18", "norm=std"),
}


@pytest.mark.table
@pytest.mark.parametrize("channels", [1, 4, 7])
@pytest.mark.parametrize("kind", SPREAD)
def test_weights_of_three_channels_are_spread_as_timm_does(kind, channels, trained, tmp_path):
    """Repeated, cut and times 3 / channels; one channel gets their sum, so gray images give what they give as RGB."""
    format, file = kind and kind.split("'")[0], tmp_path / "net.pth.tar"
    if format is None:
        write(file, trained, "norm=std")
        stored = trained.state_dict()["body.mod1.conv1.weight"]
    elif format in ("standard_bn", "released"):
        content = {f"module.{name}": tensor for name, tensor in trained.body.state_dict().items()}
        torch.save({"state_dict": content} if format == "released" else trained.state_dict(), file)
        stored = trained.state_dict()["body.mod1.conv1.weight"]
    else:
        pytest.importorskip(format)
        library_network = torchvision.models.resnet18()  # timm's has the same names
        torch.save(library_network.state_dict(), file)
        stored = library_network.conv1.weight.detach()
    init_words = (f"init.weights={file}", *([f"init.format={format}"] if format else []))
    data_words = ("data=folder", "data.root=gone", f"data.channels={channels}")
    data_words += ("init.scale=raw",) if format == "released" else ()
    tuned, report = started(config := run_config(*SPREAD[kind], *init_words, *data_words))
    name = "conv1.weight" if config.body.in_library else "mod1.conv1.weight"
    if channels == 1:
        expected = stored.sum(dim=1, keepdim=True)
    else:
        expected = torch.cat([stored] * 3, dim=1)[:, :channels] * (3 / channels)
    assert torch.equal(tuned.body.state_dict()[name], expected)
    assert f"body.{name}: the weights of 3 channels are spread over {channels}" in str(report)
    with suppress(ImportError):
        from timm.models import adapt_input_conv

        torch.testing.assert_close(adapt_input_conv(channels, stored), expected, rtol=1e-6, atol=0)


def test_weights_of_other_numbers_of_channels_fit_their_own_alone(tmp_path):
    keys = ("data=folder", "data.root=gone", "norm=std")
    four = assemble.network_of(run_config(*keys, "data.channels=4"), 3)
    write(tmp_path / "last.pt", four, *keys, "data.channels=4")
    keys += (f"init.weights={tmp_path / 'last.pt'}",)
    tuned, report = started(run_config(*keys, "data.channels=4"))
    assert "spread" not in str(report) and same(tuned.state_dict(), four.state_dict())
    for channels in (3, 5):
        misfit = rf"mod1.conv1.weight is \d+x4x3x3 in the file and \d+x{channels}x3x3 in the network"
        with pytest.raises(ValueError, match=misfit):
            started(run_config(*keys, f"data.channels={channels}"))


def test_images_are_normalised_as_those_that_a_checkpoint_was_trained_on(tmp_path):
    """If they have as many channels. Other programs' files do not say it."""
    keys = ("data=folder", "data.root=gone", "norm=std", "data.channels=2", "data.mean=[0.25,0.5]", "data.std=[1,1]")
    trained = assemble.network_of(run_config(*keys), 3)
    write(tmp_path / "last.pt", trained, *keys)
    assert normalisation_of(Init(str(tmp_path / "last.pt")), channels=2) == ((0.25, 0.5), (1, 1))
    assert normalisation_of(Init(str(tmp_path / "last.pt")), channels=3) is None
    torch.save(trained.state_dict(), tmp_path / "net.pth")
    for init in (Init(), Init("published"), Init(str(tmp_path / "net.pth")), Init("gone", format="standard_bn")):
        assert normalisation_of(init, channels=2) is None
