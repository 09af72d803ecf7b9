"""Configurations: every shipped one composes, builds and steps; wrong ones are refused, naming the key."""

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from functools import partial

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode

from datasets import WholeImages
from engine import assemble
from engine.checkpoint import recorded
from engine.configuration import choices as choices_of
from engine.configuration import config as cfg
from engine.process.distributed import World
from engine.schema.classification import ClassificationRun
from engine.schema.keys import CHOICES, complete_and_check
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import Extent
from engine.training import build, papers
from keepless import ABN, CheckpointedABN, InPlaceABN
from models import bodies
from models.released_norm import released_abn
from scripts import compare_runs, run_table  # noqa: F401  # commands that tests compose
from tests import runs
from tests.runs import checked, classification_config, run_config, with_key

CPU = torch.device("cpu")
ENTRIES = {SegmentationRun: run_config, ClassificationRun: classification_config}
EXPERIMENTS = {name: schema for schema in ENTRIES for name in choices_of.choices("experiment", schema)}


def experiment(name: str) -> SegmentationRun | ClassificationRun:
    return ENTRIES[EXPERIMENTS[name]](f"experiment={name}")


FIRST_OF_EACH_TABLE = list({name.split("/")[0]: name for name in sorted(EXPERIMENTS, reverse=True)}.values())


@pytest.mark.parametrize(
    "names", [FIRST_OF_EACH_TABLE, pytest.param(list(EXPERIMENTS), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_what_an_experiment_says_is_what_its_run_does(names):
    """No key of the entry's own defaults overrides it."""
    for name in names:
        content = OmegaConf.to_container(OmegaConf.load(runs.REPOSITORY / "configs" / "experiment" / f"{name}.yaml"))
        del content["defaults"]
        values = cfg.flat(cfg.plain(experiment(name)))
        assert {key: values[key] for key in cfg.flat(content)} == cfg.flat(content), name
        lengths = {key for key in ("trainer.epochs", "trainer.steps") if values[key] is not None}
        unsaid = lengths - papers.settings_of(name).keys()
        assert len(lengths) == 1 or not unsaid, f"{name}: {unsaid} may end it before: set it, or to null"


def reached(config: ClassificationRun) -> dict:
    """Return the values that network, optimiser, schedule and loaders take from the keys of an experiment."""
    schedule = assemble.schedule_of(config, images=1_281_167 if config.data.name == "imagenet" else 50_000)
    with torch.device("meta"):
        network = assemble.network_of(config, classes=10)
    optimizer = assemble.optimizer(config.optim, network, config.head_modules)
    scheduler = assemble.lr_schedule(config.lr_schedule, optimizer, schedule)
    norms = {(type(m), m.activation, m.eps, m.momentum) for m in network.modules() if isinstance(m, ABN)}
    decays = {(p.ndim > 1, group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    groups = {(group["lr"], group["momentum"], group["nesterov"]) for group in optimizer.param_groups}
    return {
        "body": (type(network).__name__, sum(p.numel() for p in network.parameters()), network.reversible),
        "norms": norms,
        "decays": decays,
        "groups": groups,
        "schedule": (sorted(scheduler.milestones), scheduler.gamma, schedule.total_steps),
        "minibatch": (config.data.crops_per_minibatch, config.trainer.accumulation_steps),
        "data": config.data.name,
    }


REVNETS = {  # as in `models.bodies`, whose parameters tests/models/test_bodies.py counts
    **{f"cifar10_{kind}{depth}": f"{kind}{depth}_cifar" for kind in ("resnet", "revnet") for depth in (110, 164)},
    **{"cifar10_resnet32": "resnet32_cifar", "cifar10_revnet38": "revnet38_cifar"},
    **{"imagenet_resnet101": "preact_resnet101", "imagenet_revnet104": "revnet104"},
}


QUICK = ("cifar10_revnet38", "imagenet_resnet101")  # of revnet
QUICK += ("table3/coco_stuff_resnext101_inplace_sync_fixed_batch", "table4/vistas_wrn38_776_sync_cus")


def some_slow(names: Iterable[str]) -> list:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in names]


@pytest.mark.parametrize("name", some_slow(REVNETS))
def test_revnet_s_and_memcnn_s_experiments_are_the_paper_s(name):
    """Section 7.1 and table 2. MemCNN trains the same on CIFAR."""
    config, (dataset, network) = experiment(f"revnet/{name}"), name.split("_")
    cifar = dataset == "cifar10"
    with torch.device("meta"):
        parameters = sum(p.numel() for p in getattr(bodies, REVNETS[name])(classes=10).parameters())
    assert reached(config) == {
        "body": ("RevNet", parameters, network.startswith("revnet")),
        "norms": {(ABN, "relu", 1e-3, 0.01)},
        "decays": {(True, 2e-4 if cifar else 1e-4), (False, 0.0)},  # weights of convolutions and linear layers only
        "groups": {(0.1, 0.9, False)},
        "schedule": ([40_000, 60_000], 0.1, 80_000) if cifar else ([160_000, 320_000, 480_000], 0.1, 600_000),
        "minibatch": (100, 1) if cifar else (256, 2 if network == "resnet101" else 1),
        "data": dataset,
    }
    data = config.data
    if not cifar:
        assert (data.crops, data.crop_size) == ("release", 224)
        return
    assert (data.crop_size, data.padding, data.flip, data.mean_image, data.mean) == (32, 2, 0.5, True, [0, 0, 0])
    assert data.std == pytest.approx([1 / 255] * 3)
    assert config == experiment(f"memcnn/{name}")
    of_100_classes = with_key(config, "data.name", "cifar100")
    for name in ("revnet", "memcnn"):
        assert asdict(of_100_classes) == asdict(experiment(f"{name}/cifar100_{network}"))


# Crops per minibatch, their size, and thousands of steps in tables 3 and 4.
TABLE_3 = {
    ("cityscapes", "resnext101"): ((16, 512, 66.9), (28, 512, 38.2), (16, 672, 66.9), (16, 672, 66.9)),
    ("coco_stuff", "resnext101"): ((16, 480, 75), (24, 480, 50), (16, 600, 75), (16, 600, 75)),
    ("cityscapes", "wrn38"): ((20, 512, 53.5), (28, 512, 38.2), (20, 640, 53.5), (20, 640, 53.5)),
    ("coco_stuff", "wrn38"): ((20, 496, 60), (28, 496, 42.9), (20, 576, 60), (20, 576, 60)),
}
ROWS = ("std", "inplace_fixed_crop", "inplace_fixed_batch", "inplace_sync_fixed_batch")
TABLE_4 = {
    "cityscapes_resnext152_680_sync": (12, 680, 89.25),
    "cityscapes_wrn38_712": (16, 712, 66.9),
    "cityscapes_wrn38_712_sync": (16, 712, 66.9),
    "cityscapes_wrn38_872_sync": (12, 872, 89.25),
    "cityscapes_wrn38_872_sync_cus": (12, 872, 89.25),
    "vistas_wrn38_776_sync_cus": (12, 776, 135),
}
SEGMENTATION = {
    f"table3/{data}_{body}_{row}": numbers
    for (data, body), rows in TABLE_3.items()
    for row, numbers in zip(ROWS, rows, strict=True)
} | {f"table4/{name}": numbers for name, numbers in TABLE_4.items()}
FULL_NETWORKS = {  # parameters without the classifier, which has 257 for each class
    "resnext101": 56_393_299 - 257 * 19,
    "resnext152": 71_650_899 - 257 * 19,
    "wrn38": 135_815_251 - 257 * 19,
}


@functools.cache
def parameters_of(name: str) -> int:
    """Count the parameters of an experiment's network without its classifier."""
    with torch.device("meta"):
        network = assemble.network_of(experiment(name), 1)
    return sum(p.numel() for p in network.parameters()) - 257


@pytest.mark.parametrize("name", some_slow(SEGMENTATION))
def test_segmentation_experiments_are_the_paper_s(name):
    config = experiment(name)
    data, body, *_ = name.partition("/")[2].replace("coco_stuff", "coco").split("_")
    crops, size, thousands_of_steps = SEGMENTATION[name]
    assert (config.data.crops_per_minibatch, config.data.crop_size) == (crops, size)
    images, classes = {"cityscapes": (2975, 19), "coco": (40_000, 91), "vistas": (18_000, 65)}[data]
    assert assemble.official_images(config.data)["train"] == images
    steps = images * config.trainer.epochs / crops
    assert abs(steps / 1000 - thousands_of_steps) < 0.06
    assert papers.paper_of(name)["steps"] == images // crops * config.trainer.epochs  # whole minibatches
    assert (config.norm.name, config.norm.activation) == ("std" if name.endswith("_std") else "inplace", "leaky_relu")
    assert config.norm.sync == ("_sync" in name)
    lr = 3.5e-3 if data == "vistas" else 2.5e-3
    assert (config.optim.lr, config.optim.momentum, config.optim.weight_decay) == (lr, 0.9, 1e-4)
    assert (config.lr_schedule.name, config.loss.name, config.loss.fraction) == ("poly", "bootstrapped", 0.25)
    assert (config.sampler.name == "class_uniform") == name.endswith("_cus")
    first = next(other for other in SEGMENTATION if body in other)
    assert (config.body, config.head) == (experiment(first).body, experiment(first).head)
    assert parameters_of(first) == FULL_NETWORKS[body] and assemble.official_classes(config.data) == classes


def test_the_command_line_wins_over_an_experiment_that_extends_another():
    choices_made = ("norm=inplace", "norm.activation=leaky_relu", "body=resnet50", "optim.lr=0.3")
    config = classification_config("experiment=memcnn/cifar100_revnet38", *choices_made)
    assert (config.norm.name, config.norm.eps, config.body.name, config.optim.lr) == ("inplace", 1e-3, "resnet", 0.3)


def step_on_fake_tensors(config: SegmentationRun | ClassificationRun) -> None:
    """Shapes and dtypes of a whole training step without arithmetic, with one block or layer per stage."""
    config.body.structure = [1] * len(config.body.structure)
    config.optim.fused = False  # for which PyTorch would make real tensors of the fake ones
    segments = isinstance(config, SegmentationRun)
    size = (64, 96) if segments else (config.data.crop_size,) * 2
    with FakeTensorMode():
        network = assemble.network_of(config, classes=10)
        forward = assemble.forward(config, torch.nn.Identity(), CPU).with_network(
            network
        )  # fake parameters cannot be moved
        optimizer = assemble.optimizer(config.optim, network, config.head_modules)
        scheduler = assemble.lr_schedule(config.lr_schedule, optimizer, assemble.schedule_of(config, images=1000))
        outputs = forward(torch.zeros(2, 3, *size, dtype=torch.uint8))
        logits = outputs.main.logits if segments else outputs
        if segments:
            has_values = config.loss.name == "library"  # its code asks for values, which fake tensors lack
            loss_config = CHOICES["loss"]["cross_entropy"]() if has_values else config.loss
            loss = assemble.loss(loss_config)(outputs, torch.zeros(2, *size, dtype=torch.uint8))
        else:
            loss = torch.nn.functional.cross_entropy(logits, torch.zeros(2, dtype=torch.int64))
        loss.backward()
        optimizer.step()
        scheduler.step()
    cells = [-(-side // network.body.output_stride) for side in size] if segments else []
    assert logits.shape == (2, 10, *cells) and (loss.dtype == torch.float32 or not segments)
    assert all(p.grad.shape == p.shape for p in network.parameters())
    assert all(m.sync == config.norm.sync for m in network.modules() if isinstance(m, ABN))


# Of every kind; see `test_bodies_are_the_named_networks` for the others.
KINDS = ("densenet121", "resnet34", "resnext_cifar_small", "preact_resnet101", "revnet_tiny", "wider_resnet38_a2")
GROUPS = ("norm", "head", "data", "sampler", "loss", "optim", "lr_schedule", "trainer", "debug")
SHARED = ("data", "optim", "lr_schedule", "trainer", "debug")  # that both entries have, besides body and norm


def combinations(schema: type, groups: tuple[str, ...], bodies: tuple[str, ...]) -> Iterator[tuple[type, list[str]]]:
    """Each choice with some of the other groups, which do not know each other."""
    names = {"body": bodies} | {group: choices_of.choices(group, schema) for group in groups}
    if "norm" in names:
        names["norm"].remove("package")  # not installed everywhere
    for number in range(max(map(len, names.values()))):
        yield schema, [f"{group}={choices[number % len(choices)]}" for group, choices in names.items()]


# A classifier of each kind takes a step in tests/models/test_bodies.py.
COMBINATIONS = [
    *combinations(SegmentationRun, ("norm", "head", "sampler", "loss", *SHARED), KINDS),
    *combinations(ClassificationRun, SHARED, ("resnext_cifar_small",)),
]


@pytest.mark.table
@pytest.mark.parametrize("schema, overrides", COMBINATIONS)
def test_every_choice_composes_builds_and_steps(schema, overrides):
    """Choices must fit the entry's task."""
    norm = next((choice.partition("=")[2] for choice in overrides if choice.startswith("norm=")), "inplace")
    shares = any(entry.name == "sync" for entry in fields(CHOICES["norm"][norm]))
    config = ENTRIES[schema](*overrides, *["norm.sync=true"] * shares)
    assert recorded.from_plain(cfg.plain(config), schema) == config
    step_on_fake_tensors(config)


# Parameters of networks that have no function in `models.bodies`.
OTHER_BODIES = {"densenet121": 6_953_856, "densenet169": 12_484_480, "densenet201": 18_092_928}  # torchvision's
OTHER_BODIES |= {"resnet_cifar_small": 695_328, "resnext_cifar_small": 294_816, "revnet_tiny": 92_432}


@pytest.mark.slow
def test_bodies_are_the_named_networks():
    """The others repeat the same blocks less or more often, or are narrower: they build."""
    for name in choices_of.choices("body", SegmentationRun):
        config, named = run_config(f"body={name}", "norm=std").body, getattr(bodies, name, None)
        with torch.device("meta"):
            body = assemble.body(config, partial(ABN, activation="relu"))
            if named is not None:
                expected = named(partial(ABN, activation="relu"), output_stride=config.output_stride)
                assert str(body) == str(expected) and body.output_stride == expected.output_stride, name
        if name in OTHER_BODIES:
            assert sum(p.numel() for p in body.parameters()) == OTHER_BODIES[name], name


def test_norm_choices_are_the_layers_of_figure_2():
    for norm, cls, option in (
        ("std", ABN, {}),
        ("checkpoint", CheckpointedABN, {"store": "x"}),
        ("checkpoint_xhat", CheckpointedABN, {"store": "x_hat"}),
        ("inplace_1", InPlaceABN, {"variant": "I"}),
        ("inplace", InPlaceABN, {"variant": "II"}),
    ):
        layer = assemble.norm_act(run_config(f"norm={norm}", "norm.sync=true", "norm.backend=eager").norm)(4)
        assert type(layer) is cls and option.items() <= vars(layer).items()
        assert layer.sync and layer.backend == "eager"


def test_without_the_released_package_its_norm_choice_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "inplace_abn", None)
    released_abn.cache_clear()
    with pytest.raises(ValueError, match="pip install --no-build-isolation inplace-abn"):
        assemble.network_of(run_config("norm=package", "norm.activation=elu"), classes=3)


def test_ranks_share_minibatches_and_images(tmp_path):
    config = run_config("sampler=class_uniform", f"sampler.folder={tmp_path}", "data.crops_per_minibatch=6")
    dataset, seen = assemble.dataset(config.data, "train", draw=True), []
    index = assemble.class_index(config, dataset, World(), lambda *counts: seen.append(counts))
    assert seen[-1] == (len(dataset), len(dataset)) and list(tmp_path.rglob("index.npz"))
    whole, rank = (assemble.training_loader(config, dataset, 9, World(r, n), 2, index) for r, n in ((0, 1), (1, 2)))
    assert list(rank.batch_sampler) == [minibatch[3:] for minibatch in whole.batch_sampler]
    worlds = [World(rank=rank, size=3) for rank in range(3)]
    shares = [assemble.evaluation_loader(WholeImages(dataset), config.data, world, 7) for world in worlds]
    assert [list(share.sampler) for share in shares] == [[0, 3, 6], [1, 4], [2, 5]]  # each image once


@pytest.mark.parametrize(
    "overrides, message",
    [
        ("trainer.epochs=null", "trainer.epochs and trainer.steps are both null"),
        ("trainer.patience=3 trainer.evaluate_every_epochs=null", "^trainer.patience=3 counts evaluations"),
        ("norm=package trainer.precision=bfloat16", "norm=package.*trainer.precision=float32 .*or norm=inplace"),
        ("norm.activation=relu", "^norm.activation='relu' maps all negative .* use norm.activation='leaky_relu'"),
        ("norm=inplace_1 norm.activation_param=0", "^norm.activation_param=0 makes leaky_relu not invertible"),
        ("norm.name=std", "norm.name=std does not change the norm: give norm=std"),
        ("data=cityscapes data.name=camvid", "data.name=camvid does not change the data: give data=camvid"),
        ("body.output_stride=4", "body.output_stride=4: expected one of 8, 16, 32 with body.stem=3x3"),
        ("body=resnet32_cifar body.keep_activations=true", "body.reversible=false: a ResNet keeps its activations"),
        ("trainer.accumulation_steps=8", r"accumulation_steps=8 gives 1 crop\(s\) at a time.*at least 16"),
        ("trainer.recompute=budget", "trainer.recompute=budget needs a device's memory: give memory.budget="),
        ("memory.activations=1GiB", "memory.activations=1GiB needs trainer.recompute=budget"),
        ("trainer.recompute=budget memory.activations=1GiB memory.budget=2GiB", "memory.activations=1GiB with memory"),
        ("trainer.recompute=budget memory.budget=2GiB trainer.compile=true", "budget with trainer.compile=true: "),
        ("trainer.recompute=activations trainer.compile=true", "activations with trainer.compile=true: the compiler "),
        ("body=revnet_tiny trainer.recompute=sqrt", "trainer.recompute=sqrt with body=revnet: "),
        ("resume=auto", "resume=auto needs run_dir"),
        ("init.format=standard_bn", "init.format=standard_bn needs init.weights=FILE"),
        ("init.scale=raw init.weights=a.pt", "init.scale=raw needs init.format=released"),
        ("init.weights=published init.format=timm", "init.weights=published needs body=torchvision or body=timm"),
        # A library's network names the nearest norm that it can have.
        (
            "body=torchvision norm=inplace",
            "norm=inplace .* trained with ReLU.*: norm=std trainer.recompute=activations keeps as little",
        ),
        ("body=torchvision norm=package norm.activation=leaky_relu", "norm=package with body=torchvi.* norm=inplace k"),
        ("body=torchvision norm=checkpoint", "checkpoint with body=torchvision: .* norm=std trainer.recompute=activ"),
        ("body=torchvision norm=std norm.activation=tanh", "tanh with body=torchvision: expected one of relu"),
        (
            "body=torchvision norm=std body.weights=a.pt init.weights=b.pt",
            "weights=a.pt and init.weights=b.pt: give one",
        ),
    ],
)
def test_bounds_and_rules_across_keys(overrides, message):
    """Choices are composed, and keys then set: Hydra would read every file again for each of them."""
    values = dict(override.split("=") for override in overrides.split())
    with pytest.raises(ValueError, match=message):
        config = run_config(*(f"{group}={choice}" for group, choice in values.items() if group in (*GROUPS, "body")))
        for key in values.keys() - {*GROUPS, "body"}:
            config = with_key(config, key, yaml.safe_load(values[key]))
        complete_and_check(config)


def test_weights_of_networks_with_relu_need_norms_that_can_have_it():
    with pytest.raises(ValueError, match="norm=inplace .* trained with ReLU"):
        run_config("init.weights=a.pth", "init.format=torchvision")


def test_every_path_may_begin_with_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = run_config('run_dir="~/run"', 'init.weights="~"', 'data.root="${oc.env:HOME}/~/x"')
    assert (config.run_dir, config.data.root) == (f"{tmp_path}/run", f"{tmp_path}/~/x")
    assert config.init.weights == "~"  # another home does not keep a run from being continued
    table = checked("run_table", "table=table3", 'roots={cityscapes: "~/data"}')
    assert table.roots == {"cityscapes": f"{tmp_path}/data"}
    monkeypatch.setenv("OUT", "~/pages")
    assert checked("compare_runs", "runs=[a]", "out=${oc.env:OUT}").out == f"{tmp_path}/pages"
    comparison = checked("compare_runs", 'runs=["~/a",b]', "out=c")
    assert comparison.runs == [f"{tmp_path}/a", "b"]


def test_settings_that_look_like_mistakes_are_doubted_at_the_start():
    keys = ("body.frozen_norms=all", "norm=package", "data.crops_per_minibatch=12")
    doubts = [*run_config(*keys).doubts(Extent(11, 8, process_count=3, step_count=100, shared_count=5))]
    subjects = [text.partition(":")[0].partition(" ")[0] for text in doubts]
    assert subjects == ["body.frozen_norms=all", "data.val_split=val", "8", "norms"]
    assert "5 of its images are trained on" in doubts[1]
    assert "norms normalise 4 crop(s)" in doubts[-1]
    plain = run_config("data.crops_per_minibatch=8", "trainer.ema_decay=0.9")
    assert [*plain.doubts(Extent(11, 8, process_count=1, step_count=100))] == []
    cut = run_config("data.crops_per_minibatch=8", "trainer.steps=101", "norm.momentum=0.99")
    length, momentum = cut.doubts(Extent(11, 8, process_count=1, step_count=100))
    assert "after 100 of trainer.steps=101, as the shorter counts: give trainer.epochs=null" in length
    assert momentum.endswith("give norm.momentum=0.01")
    classification = checked("train_imagenet", "data=cifar10")
    extent = Extent(9, 50_000, process_count=1, step_count=100, official_class_count=10)
    (doubt,) = classification.doubts(extent)
    assert "holds 9 classes, one per folder; cifar10 has 10" in doubt


def test_an_average_that_is_mostly_of_the_first_step_is_doubted():
    """Its scores are about an untrained network."""
    for decay, steps, words in ((0.9999, 500, "95% of .*; give at most 0.98"), (1.0, 5, "100% of .*; leave it out")):
        (doubt,) = run_config(f"trainer.ema_decay={decay}").doubts(Extent(11, 50, 1, step_count=steps))
        assert re.fullmatch(f"trainer.ema_decay={decay} over {steps} steps: {words}", doubt)


def test_a_smoke_run_fits_any_number_of_processes_and_any_schedule(monkeypatch):
    monkeypatch.setattr("engine.configuration.command_line.world_size", lambda: 3)
    keys = ("debug=smoke", "lr_schedule.warmup_epochs=5", "optim.max_gradient_norm=0.5")
    config = checked("train_seg", *keys)
    config.check_shares(process_count=3)
    assert config.data.crops_per_minibatch == 6
    schedule = assemble.schedule_of(config, images=100)
    learner = build.learner(config, 3, schedule, World())
    assert {norm.backend for norm in learner.network.modules() if isinstance(norm, ABN)} == {"eager"}
    assert learner.max_gradient_norm == 0.5
    with pytest.raises(ValueError, match="the warm-up takes 80 steps, and the run has 2"):
        no_smoke = replace(config, trainer=replace(config.trainer, smoke=False))
        build.learner(no_smoke, 3, schedule, World())


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("data.mean", "red", "data.mean"),
        ("trainer.unheard_of", 1, "unheard_of"),
        ("seed", "${nothing}", "nothing"),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused_by_file_and_key(key, value, message):
    values = cfg.plain(run_config())
    *groups, name = key.split(".")
    functools.reduce(dict.get, groups, values)[name] = value
    with pytest.raises(ValueError, match=f"(?s)^checkpoint a.pt: its configuration does not fit .*{message}"):
        recorded.from_plain(values, SegmentationRun, "checkpoint a.pt")


def test_the_configuration_of_a_checkpoint_is_the_one_that_was_recorded():
    state = {"task": "segmentation", "config": cfg.plain(run_config())}
    assert recorded.of_checkpoint(state, "checkpoint a.pt") == run_config()


def test_ranks_share_the_keys_that_decide_when_they_meet_and_not_the_places_of_files():
    shared = cfg.values_but(run_config(), "per_machine").keys()
    intervals = {f"trainer.{event}_every_steps" for event in ("evaluate", "checkpoint", "log")}
    assert {*intervals, "trainer.pictures", "optim.lr", "resume", "run_dir"} <= shared
    of_a_machine = {"data.root", "data.workers", "data.timeout_seconds", "sampler.folder", "trainer.device"}
    assert not of_a_machine & shared


@pytest.mark.parametrize("text", ["${oc.env:HOME}", r"\${a}", r"C:\\${oc.env:HOME}\\", "${unfinished", "$", r"\\"])
def test_a_checkpoint_reads_no_environment_variable(text):
    config = run_config("data=cityscapes", "data.root=DIR")
    values = cfg.plain(config)
    values["data"]["root"] = text
    assert recorded.from_plain(values, SegmentationRun).data.root == text
