"""The search for what fits, and trainings that spend a budget."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml

import train_imagenet
import train_seg
from datasets import cityscapes
from engine.schema.memory import Memory, deductions
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun
from engine.training import loop, planner
from keepless.fit.step_memory import PlannedStep
from keepless.recompute.step import costs
from keepless.units import size_text
from scripts import plan_memory
from tests import runs, trees


def test_what_a_device_needs_leaves_its_tensors_what_they_take():
    memory = Memory(budget="10GiB")
    for device_count, tensors in ((1, 0.95 * 8.8), (4, 0.95 * 8.6)):
        assert memory.available(device_count) == pytest.approx(tensors * 2**30, abs=8)
    assert deductions(1) == "0.5GiB for CUDA, 0.7GiB for convolutions and 5% of the rest"
    assert "0.2GiB for NCCL" in deductions(4)


def leaving(mib: float, device_count: int = 1) -> str:
    """The budget that leaves so many MiB for tensors: `available` leaves 95 % of what exceeds 1.2 or 1.4 GiB."""
    fixed_gib = 1.2 if device_count == 1 else 1.4
    return f"memory.budget={math.ceil((mib / 0.95 + fixed_gib * 2**10) * 2**10)}KiB"


@pytest.fixture(autouse=True)
def modelled(monkeypatch, request):
    """Memory grows with the pixels, less with in-place norms: in place of a trace, which takes half a second."""
    if request.node.get_closest_marker("slow"):
        return

    def step_memory(config, crops: int, crop_size: int, device_count: int = 1) -> SimpleNamespace:
        peak = 2**22 + crops * crop_size**2 * {"std": 300, "checkpoint": 220}.get(config.norm.name, 200)
        return SimpleNamespace(peak=peak, kept=peak, place="forward", at_peak={"activations": peak})

    monkeypatch.setattr(planner, "step_memory", step_memory)


def test_a_minibatch_is_not_larger_than_the_split_of_this_data(tmp_path, capsys):
    root = trees.cityscapes(tmp_path)
    config = planned("data=cityscapes", f"data.root={root}", "memory.budget=24GiB", "memory.fit=batch", "norm=std")
    (chosen, _), images = planner.fit_to_budget(config), len(cityscapes(root, "train"))
    assert chosen.data.crops_per_minibatch == images
    assert planner.fitting_config(config, device_count=2).data.crops_per_minibatch == images - images % 2
    assert planner.crops_per_device(planned("data.crops_per_minibatch=5"), device_count=2) == 3  # the largest
    output = capsys.readouterr().out
    assert "memory.budget=24GiB: data.crops_per_minibatch=" in output and "on a CPU nothing enforces it" in output
    limit = f"; a minibatch has no more than the {images} training images"
    assert limit in output and planner.limit_of_images(planned("memory.fit=batch", "memory.budget=24GiB"), 1) == ""


def test_a_plan_over_the_budget_says_so_first_and_fails(capsys):
    config = runs.checked("train_seg", *SMALL, leaving(3))
    with pytest.raises(ValueError, match=f"{leaving(3)}: this step needs .* memory.fit=batch or"):
        plan_memory.plan(config)
    assert capsys.readouterr().out.startswith(f"This step does not fit into {leaving(3)}: less")


SMALL = ("body=resnext_tiny",)


def planned(*overrides: str):
    return runs.run_config("run_dir=unused", *SMALL, *overrides)


def test_the_least_share_of_synchronised_norms_is_one_crop():
    config = planned("norm=inplace", "norm.sync=true")
    peaks = [planner.step_memory(config, share, config.data.crop_size, device_count=2).peak for share in (1, 2)]
    config = planned(leaving(sum(peaks) / 2**21, device_count=2), "memory.fit=batch", "norm=inplace", "norm.sync=true")
    assert planner.fitting_config(config, device_count=2).data.crops_per_minibatch == 2
    with pytest.raises(ValueError, match="2 crops of .* pixels already need"):
        planner.fitting_config(replace(config, norm=replace(config.norm, sync=False)), device_count=2)


def test_a_training_writes_the_numbers_that_it_has_chosen(tmp_path):
    run = ("debug=smoke", *SMALL, "norm.backend=eager", "data.crop_size=64", "trainer.device=cpu")
    budget = (leaving(8), "memory.fit=batch")
    crops = planner.fitting_config(planned(*run, *budget), device_count=1).data.crops_per_minibatch
    file = tmp_path / "run" / "config.yaml"
    train_seg.train(runs.checked("train_seg", *run, *budget, f"run_dir={tmp_path / 'run'}"))
    recorded = yaml.safe_load(file.read_text())
    assert recorded["data"]["crops_per_minibatch"] == crops > 2 and recorded["memory"]["fit"] is None
    # Whatever fits now, a resumed run keeps its minibatch.
    larger = (leaving(60), "memory.fit=batch", "resume=auto", f"run_dir={tmp_path / 'run'}")
    config, _ = planner.fit_to_budget(planned(*run, *larger))
    assert config.data.crops_per_minibatch == crops
    # Without memory.fit nothing is taken from the run.
    plain = (leaving(60), "data.crops_per_minibatch=2", "resume=auto", f"run_dir={tmp_path / 'run'}")
    config, _ = planner.fit_to_budget(planned(*run, *plain))
    assert config.data.crops_per_minibatch == 2


def test_a_training_that_captures_itself_leaves_memory_for_its_graph(monkeypatch):
    """A run that is not captured, on a CPU or for another reason, has all of it."""
    fit = (leaving(46), "memory.fit=batch")
    eager = planner.fitting_config(planned(*fit), device_count=1).data.crops_per_minibatch
    assert planner.fit_to_budget(planned(*fit))[0].data.crops_per_minibatch == eager  # on a CPU
    monkeypatch.setattr(planner, "device_of", lambda *_, **__: torch.device("cuda"))
    for word in ("trainer.capture=false", "trainer.profile=2", "trainer.steps=49"):
        assert planner.fit_to_budget(planned(*fit, word))[0].data.crops_per_minibatch == eager, word
    drawing = planned(*fit, *runs.NARROW_A2, "trainer.recompute=blocks")
    assert planner.fit_to_budget(drawing)[0].data.crops_per_minibatch == eager
    fewer = planner.fitting_config(planned(leaving(40), "memory.fit=batch"), device_count=1).data.crops_per_minibatch
    assert fewer < eager
    for word in ("trainer.capture=auto", "trainer.capture=true", "trainer.steps=50"):
        chosen, because = planner.fit_to_budget(planned(*fit, word))
        assert (chosen.data.crops_per_minibatch, because) == (fewer, ""), word


@pytest.mark.parametrize("entry, short", [(train_seg, runs.SHORT), (train_imagenet, runs.SHORT_SHAPES)])
def test_a_minibatch_that_leaves_nothing_for_a_graph_is_trained_eagerly(entry, short, monkeypatch, tmp_path):
    """The learner knows why, for the log's first line, and the configuration is the one that was given."""
    for name in ("capture_problem", "capture_doubt"):
        monkeypatch.setattr(TrainingRun, name, lambda *_: None)
    monkeypatch.setattr(loop, "train", lambda run, *_: pytest.fail(f"eager, as {run.learner.eager_because}"))
    keys = ("trainer.steps=50", "data.crop_size=64", "data.crops_per_minibatch=10", f"run_dir={tmp_path / 'run'}")
    words = (entry.__name__, *short, *keys, leaving(13))
    with pytest.raises(pytest.fail.Exception, match=f"^eager, as {leaving(13)} leaves nothing for a CUDA graph$"):
        entry.train(runs.checked(*words))
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["trainer"]["capture"] == "auto"
    message = f"^trainer.capture=true: {leaving(13)} leaves nothing for a CUDA graph; give trainer.capture=auto or"
    with pytest.raises(ValueError, match=message):
        entry.train(runs.checked(*words, "trainer.capture=true"))


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["memory.budget=1GiB"], r"memory.budget=1GiB: expected more than 0.5GiB for CUDA"),
        ([leaving(3), "memory.fit=batch"], r"nothing fits; 2 crops of \d+x\d+ pixels already need .* MiB"),
        ([leaving(3)], rf"{leaving(3)}: .* need .* MiB, and 3.0 MiB are left .* memory.fit=batch chooses"),
        (["memory.budget=2GiB", "memory.gpus=4"], r"memory.gpus=4, but this run has 1 process\(es\): .*torchrun"),
    ],
)
def test_wrong_keys_and_budgets_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        planner.fit_to_budget(planned(*overrides))


def test_the_plan_of_an_experiment(capsys):
    """The pixels of a minibatch grow as in-place norms allow."""
    budget = (leaving(100, device_count=2), "memory.fit=crop", "memory.gpus=2")
    config = runs.checked("train_seg", "run_dir=unused", *SMALL, *budget, "norm=std")
    configs = plan_memory.plan(config)
    crops = {config.data.crops_per_minibatch for config in configs.values()}
    sizes = [config.data.crop_size for config in configs.values()]
    assert [*configs] == ["std", "checkpoint", "inplace"] and len(crops) == 1 and sizes[0] < sizes[2]
    peaks = [
        planner.needed_bytes(chosen, planner.crops_per_device(chosen, 2), chosen.data.crop_size, 2)
        for chosen in configs.values()
    ]
    assert max(peaks) <= 100 * 2**20 + 2**10
    assert "memory.fit=crop (the paper's fixed batch), on each of 2 devices" in capsys.readouterr().out


def test_a_plan_names_the_norms_that_nothing_fits_with_or_that_a_network_cannot_have(capsys):
    body = ("body=torchvision", "body.network=mobilenet_v3_small", "norm=std")
    config = runs.checked("train_seg", *body, leaving(100), "memory.fit=batch")
    assert [*plan_memory.plan(config)] == ["std"]
    printed = capsys.readouterr().out
    assert "norm=checkpoint: norm=checkpoint with body=torchvision: its norms can be std, inplace" in printed
    assert "norm=inplace: norm.activation='relu' maps all negative inputs to one value" in printed
    with pytest.raises(ValueError, match="no norm of these has a minibatch that fits"):
        plan_memory.plan(runs.checked("train_seg", *SMALL, leaving(3), "memory.fit=batch"))
    assert "norm=std: memory.budget=" in capsys.readouterr().out


def test_the_experiment_decides_whose_keys_are_taken():
    assert plan_memory.entry_of(["experiment=table2/wrn38_inplace_256"]) == "train_imagenet"
    assert plan_memory.entry_of(["experiment=table3/cityscapes_wrn38_std"]) == "train_seg"
    assert plan_memory.entry_of(["body=resnext_tiny"]) == "train_seg"
    assert plan_memory.entry_of(["body=resnext_tiny", "data=image_folder"]) == "train_imagenet"
    with pytest.raises(ValueError, match="experiment=table2/wrn: there is no such .* the nearest is table2/wrn38"):
        plan_memory.entry_of(["experiment=table2/wrn"])


WITHIN = ("trainer.recompute=budget", "norm=std", "norm.backend=eager", "data.crop_size=128")


def within_budget(config: SegmentationRun, device_count: int, patch: pytest.MonkeyPatch) -> tuple[tuple, PlannedStep]:
    """What `planner.memory_within_budget` returns, and the step that it plans."""
    steps = []
    plan = planner.planned_step
    patch.setattr(planner, "planned_step", lambda *arguments: steps.append(plan(*arguments)) or steps[-1])
    return planner.memory_within_budget(config, device_count), *steps


@pytest.mark.slow
def test_a_budget_leaves_activations_what_the_rest_of_the_step_does_not_take(monkeypatch):
    config = planned(*WITHIN, leaving(24), "data.crops_per_minibatch=4", "trainer.ema_decay=0.9")
    (memory, needed, sum_text), step = within_budget(config, 1, monkeypatch)
    plain = planner.step_memory(replace(config, trainer=replace(config.trainer, recompute="none")), 4, 128)
    kinds = ("weights", "average", "momentum")
    assert {kind: step.resident[kind] for kind in kinds} == {kind: plain.at_peak[kind] for kind in kinds}
    assert step.gradients == step.resident["momentum"] and not step.resident["gradients"]
    left = config.memory.available(1) - step.resident_bytes
    assert memory.activation_bytes() == (left - step.gradients) // 2**10 * 2**10
    assert f"leave {size_text(left)} for activations, and {size_text(step.gradients)} of gradients" in sum_text
    # The step that trains with it, with its loss and its optimiser, keeps to the whole.
    trace = planner.step_memory(replace(config, memory=memory), 4, 128)
    assert trace.peak <= needed <= config.memory.available(1) < plain.peak
    assert step.within(config.memory.available(1))[0] >= 0.99 * left  # as that of the training


@pytest.mark.slow
def test_ranks_choose_by_the_same_times_and_leave_room_for_buckets(monkeypatch):
    """DDP copies the sums of several micro-batches' gradients into buckets."""
    run = (*WITHIN, leaving(30, device_count=2), "data.crops_per_minibatch=8", "trainer.accumulation_steps=2")
    config = planned(*run)
    with monkeypatch.context() as patch:
        patch.setattr(costs, "shortest_seconds", lambda *_: pytest.fail("each rank measures other times"))
        costs._rates.cache_clear()
        (memory, needed, _), step = within_budget(config, 2, patch)
    assert step.resident["gradients"] == 2 * step.resident["momentum"]
    trace = planner.step_memory(replace(config, memory=memory), 4, 128, device_count=2)
    assert trace.peak <= needed


@pytest.mark.slow
@pytest.mark.parametrize("fit", ["memory.fit=batch", "memory.fit=crop"])
def test_a_plan_within_a_budget_is_printed(capsys, fit):
    config = runs.checked("train_seg", "run_dir=unused", *SMALL, *WITHIN, leaving(30), fit)
    configs = plan_memory.plan(config)
    assert configs
    assert all(planner.memory_within_budget(chosen, 1)[1] <= 30 * 2**20 + 2**10 for chosen in configs.values())
    assert "trainer.recompute=budget: 30.0 MiB less" in capsys.readouterr().out
