"""Plan the memory of a training step, and the minibatch that fits, without a device."""

import os
import re
import warnings
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine.assemble.data import official_classes, official_images
from engine.assemble.network import forward
from engine.assemble.tasks import TASKS, network_of, split_of
from engine.process.console import log_to, logger, make_console
from engine.process.distributed import World, device_of, world_size
from engine.schema.data import Data
from engine.schema.keys import MOST_PIXELS, as_list
from engine.schema.memory import Memory
from engine.schema.optim import Poly
from engine.schema.schedule import Schedule
from engine.schema.training import CAPTURE_ADVICE, FEWEST_CAPTURED, TrainingRun
from engine.segmentation.cross_entropy import Batch
from engine.training import advice
from engine.training.build import learner_of, why_eager
from engine.training.learner import Learner
from engine.training.loop import Loss, accumulate_gradients
from keepless import before_capture, plan, report
from keepless.fit import CountedStep, PlannedStep, StepMemory, largest
from keepless.made_tensors import bytes_of_tensors
from keepless.recompute.signatures.plans import FEWEST
from keepless.recompute.step.costs import times_of
from keepless.saved import kept_bytes
from keepless.units import size_text
from models.private_torch import ITEM, FakeTensorMode, TorchDispatchMode, tree_map

Config = TypeVar("Config", bound=TrainingRun)

_SMALLEST_CROP = 64
_SHARES = [share / 100 for share in range(100, 0, -1)]  # of the peak without a plan
# arbitrary: the schedule's length does not affect memory
_STEPS = Schedule(2, steps_per_epoch=2, evaluate_every=None, checkpoint_every=2, log_every=2)


class FakeTensors(FakeTensorMode):
    """Context of fake tensors. Copies of networks (EMA weights) belong to the same mode."""

    def __deepcopy__(self, memo: dict) -> "FakeTensors":
        return self


def classes_of(data: Data) -> int:
    """Number of classes of a dataset; reads files only for the user's own images."""
    return official_classes(data) or len(split_of(data, data.train_split, "data.train_split").classes)


def training_images(data: Data) -> int:
    """Number of training images in data.root, or of a published dataset that is not there."""
    try:
        return len(split_of(data, data.train_split, "data.train_split"))
    except (ValueError, OSError):
        if official_classes(data) is None:
            raise
    images = official_images(data)
    return sum(images.get(split) or 0 for split in as_list(data.train_split))


def fake_step(config: TrainingRun, crops: int, crop_size: int) -> tuple[Learner, Loss, dict, dict[str, int]]:
    """A learner after its first step, so with momentum and gradients; a loss, a minibatch, and the bytes of all these.

    As on a GPU, the optimiser works on all weights at once. Norms are fused unless backend is given or device is cpu.
    """
    if config.trainer.device != "cpu":
        config = replace(config, norm=config.norm.fused())
    task = TASKS[config.task]
    learner = _fake_learner(config)
    take_optimizer_step(learner)
    size = config.data.crop(crop_size)
    images = torch.zeros(crops, config.data.channels, *size, dtype=torch.uint8)
    labels = task.labels(crops, size)
    tensors_by_kind = {
        "weights": [*learner.parameters, *learner.network.buffers()],
        "average": () if learner.average is None else learner.average.module.state_dict().values(),
        "momentum": [value for state in learner.optimizer.state.values() for value in state.values()],
        "images": [images, labels],
        "gradients": [parameter.grad for parameter in learner.parameters],
    }
    resident = {kind: bytes_of_tensors(tensors) for kind, tensors in tensors_by_kind.items()}
    loss: Loss = task.loss(config, learner.network)
    if getattr(loss, "asks_for_batch", False):
        loss = partial(_loss_of_first_batch, loss, images)
    return learner, loss, {"image": images, "label": labels}, resident


def _fake_learner(config: TrainingRun) -> Learner:
    """A learner before its first step, with gradients of zero."""
    network = network_of(config, classes_of(config.data))
    if config.trainer.channels_last:
        for parameter in network.parameters():
            if parameter.dim() == 4:  # `to` cannot move fake ones
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    plain = forward(config, nn.Identity(), torch.device("cpu")).with_network(network)
    trainer = replace(config.trainer, compile=False, capture=False)
    uncompiled = replace(config, trainer=trainer, lr_schedule=Poly())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # to copy the average's weights
        learner = learner_of(uncompiled, plain, _STEPS, World())
    learner.scaler = torch.amp.GradScaler("cpu", enabled=False)  # it would read the gradients' values
    for group in learner.optimizer.param_groups:
        group["foreach"] = not config.optim.fused
    for parameter in learner.parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return learner


def _loss_of_first_batch(loss: Loss, images: Tensor, outputs: Any, labels: Tensor) -> Tensor:
    """A loss that asks for each batch, with the first of a run."""
    batch = Batch(images[: len(labels)], ["" for _ in range(len(labels))], step=1, epoch=0.0)
    return loss(outputs, labels, batch=batch)


class _NumbersRead(TorchDispatchMode):
    """A number that is read from a fake tensor, such as an optimiser's count of steps, is 0.5: 1 less is not 0."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return 0.5 if function is ITEM else function(*args, **kwargs or {})


def take_optimizer_step(learner: Learner) -> None:
    """Take a step with the gradients that there are, on fake tensors."""
    with _NumbersRead():
        learner.step(*torch.zeros(2, dtype=torch.float64))


def step_memory(config: TrainingRun, crops: int, crop_size: int, device_count: int = 1) -> StepMemory:
    """The memory of one device in the second step of a training, on crops of `crop_size`.

    With several devices, gradients are in DDP's buckets all the time (`gradient_as_bucket_view=True`); of several
    micro-batches, their sums. A captured step holds them in buffers likewise (`engine.training.capture`), except that
    of several micro-batches the first one makes them. (trainer.capture=auto is planned as eager steps.)
    """
    parts = config.trainer.accumulation_steps
    in_buckets = parts == 1 if config.trainer.capture is True else device_count > 1
    with FakeTensors():
        learner, loss, minibatch, resident = fake_step(config, crops, crop_size)
        is_planned = config.trainer.recompute == "budget"
        if is_planned:  # the first step is watched, and its plan holds from the second on
            accumulate_gradients(learner, loss, minibatch, crops, World())
        if not in_buckets or parts > 1:
            learner.optimizer.zero_grad()
        if in_buckets:  # a budget then leaves their room to gradients, as where a hook takes them
            for parameter in learner.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _: None)
        with CountedStep() as step:

            def ending(outputs: Any, labels: Tensor) -> Tensor:
                return step.forward_ends(loss(outputs, labels))

            accumulate_gradients(learner, ending, minibatch, crops, World())
            step.backward_ends(learner.parameters)
            take_optimizer_step(learner)
        if is_planned:
            kept = report(learner.network).bytes
        else:  # in a separate pass: hooks on saved tensors keep some of them for longer
            images, labels = (minibatch[key].tensor_split(parts)[0] for key in ("image", "label"))
            kept = kept_bytes(learner.network, lambda: loss(learner.forward(images), labels), [images, labels])
    return step.memory(resident if in_buckets else resident | {"gradients": 0}, kept)


def needed_bytes(
    config: TrainingRun, crops: int, crop_size: int, device_count: int = 1, is_captured: bool = False
) -> int:
    """Bytes of tensors on one device in such a step; with trainer.recompute=budget the fewest within `memory.time`."""
    if config.trainer.recompute == "budget":
        return planned_step(config, crops, crop_size, device_count, is_captured).least(config.memory.time)
    return step_memory(config, crops, crop_size, device_count).peak


def planned_step(
    config: TrainingRun,
    crops: int,
    crop_size: int,
    device_count: int = 1,
    is_captured: bool = False,
    available: int = 0,
) -> PlannedStep:
    """The second step of a training, with plans for its activations, among them one for `available` bytes in all.

    Gradients take memory as they come, and budgets leave their room free until then. But several micro-batches,
    captured steps and DDP's buckets hold them throughout; with several devices and micro-batches, twice.
    """
    trainer = config.trainer
    is_captured = is_captured or trainer.capture is True
    same_times = times_of("meta") if device_count > 1 else nullcontext()  # ranks measure different ones
    with FakeTensors(), same_times:
        learner, loss, minibatch, resident = fake_step(replace(config, memory=Memory()), crops, crop_size)
        images, labels = (minibatch[key].tensor_split(trainer.accumulation_steps)[0] for key in ("image", "label"))
        with CountedStep() as of_optimizer:
            take_optimizer_step(learner)
        come_one_by_one = device_count == trainer.accumulation_steps == 1 and not is_captured
        if come_one_by_one:
            learner.optimizer.zero_grad()
        inputs = learner.forward.normalised(images)
        loss_bytes = _bytes_of_loss(learner, loss, inputs, labels)
        resident |= {"images": resident["images"] + inputs.nbytes, "loss": loss_bytes}
        if device_count > 1 and trainer.accumulation_steps > 1 and not is_captured:
            resident["gradients"] *= 2
        left = available - sum(resident.values())  # `resident` has all gradients, also the ones that come later
        if come_one_by_one:
            resident["gradients"] = 0
        budgets = [*_SHARES, left] if left >= FEWEST else _SHARES
        with learner.forward.autocast():
            planned = plan(learner.network, inputs, budgets)
    plans = dict.fromkeys((row.peak, 1 + row.seconds) for row in planned.rows)
    return PlannedStep(resident, planned.gradients, of_optimizer.peak, list(plans))


def _bytes_of_loss(learner: Learner, loss: Loss, inputs: Tensor, labels: Tensor) -> int:
    """Bytes that the loss of a network's outputs needs for its forward and backward pass."""
    with torch.no_grad(), learner.forward.autocast():
        outputs = learner.network(inputs)
    outputs = tree_map(lambda leaf: leaf.detach().requires_grad_() if isinstance(leaf, Tensor) else leaf, outputs)
    with CountedStep() as step:
        loss(outputs, labels).backward()
    return step.peak


def memory_within_budget(config: TrainingRun, device_count: int, is_captured: bool = False) -> tuple[Memory, int, str]:
    """For trainer.recompute=budget: keys with `memory.activations`, the bytes that `memory.budget` leaves for them.

    If no plan fits, the bytes of the plan with the lowest peak. Also returns the step's bytes, and a text that shows
    how these add up.
    """
    available = config.memory.available(device_count, is_captured)
    with before_capture() if is_captured else nullcontext():
        step = planned_step(
            config, crops_per_device(config, device_count), config.data.crop_size, device_count, is_captured, available
        )
    peak, time = step.within(available)
    left = max(available - step.resident_bytes, peak + 2**10)
    resident = ", ".join(f"{size_text(size)} of {kind}" for kind, size in step.resident.items() if size)
    comes = f", and {size_text(step.gradients)} of gradients as they come" if step.gradients else ""
    sum_text = (
        f"{size_text(available)} less {resident} leave {size_text(left)} for activations{comes}: a peak of "
        f"{size_text(peak)} instead of {size_text(step.plans[0][0])}, for {time:.2f} of the time (estimated)"
    )
    return Memory(activations=f"{(left - step.gradients) // 2**10}KiB"), step.needed(peak), sum_text


def crops_per_device(config: TrainingRun, device_count: int) -> int:
    """Crops per device: the largest share, if the minibatch cannot be split evenly."""
    return -(-config.data.crops_per_minibatch // device_count)


def fitting_config(config: Config, device_count: int, is_captured: bool = False) -> Config:
    """A copy with the minibatch or crop size that `memory.fit` chooses for `memory.budget`.

    ValueError: nothing fits; the message says how much the smallest minibatch or crop needs.
    """
    memory = config.memory
    fewest = config.fewest_on_each(device_count) * config.trainer.accumulation_steps
    available = memory.available(device_count, is_captured)
    size = config.data.crop_size
    share = crops_per_device(config, device_count)

    def peak(crops: int, side: int) -> int:
        return needed_bytes(config, crops, side, device_count, is_captured)

    if memory.fit == "batch":
        smallest = fewest, size
        most = training_images(config.data) // device_count
        chosen = largest(lambda crops: peak(crops, size), available, fewest, step=1, power=1, most=most)
    else:
        smallest = share, _SMALLEST_CROP
        chosen = largest(lambda side: peak(share, side), available, _SMALLEST_CROP, step=8, power=2, most=MOST_PIXELS)
    if chosen is None:
        raise ValueError(
            f"memory.budget={memory.budget} with memory.fit={memory.fit}: nothing fits; {smallest[0]} crops of "
            f"{crop_text(config.data, smallest[1])} pixels already need {size_text(peak(*smallest))} on a device, and "
            f"{size_text(available)} are left for tensors"
        )
    fitted_config = deepcopy(config)
    if memory.fit == "batch":
        fitted_config.data.crops_per_minibatch = chosen * device_count
    else:
        fitted_config.data.crop_size = chosen
    return fitted_config


def limit_of_images(config: TrainingRun, device_count: int) -> str:
    """For messages: says so if the training images, and not memory, limit a minibatch that was fitted. Else empty."""
    if config.memory.fit != "batch":
        return ""
    images = training_images(config.data)
    is_limited = images - config.data.crops_per_minibatch < device_count
    return f"; a minibatch has no more than the {images} training images" if is_limited else ""


def fit_to_budget(config: Config) -> tuple[Config, str]:
    """The configuration to train, with `memory.fit` turned into plain numbers. A resumed run already has them.

    If the run will be captured, it also fits a CUDA graph. With trainer.capture=auto, where no graph would fit, the
    second value says so, for `Run.start`; otherwise it is empty.

    ValueError: nothing fits into `memory.budget`; or, without `memory.fit`, the step does not.
    """
    memory = config.memory
    process_count = world_size()
    if memory.gpus not in (None, process_count):
        raise ValueError(
            f"memory.gpus={memory.gpus}, but this run has {process_count} process(es): leave it out, or start as many "
            f"with torchrun --nproc-per-node {memory.gpus}"
        )
    if memory.budget is None:
        return config, ""
    world = World(size=process_count, device=device_of(config.trainer.device, key="trainer.device"))
    with FakeTensors():
        network = network_of(config, classes_of(config.data))
    is_eager = why_eager(config, network, config.trainer.steps or FEWEST_CAPTURED, world) is not None
    rank = int(os.environ.get("RANK", "0"))
    log_to(make_console(rank), None, rank)
    if is_eager:
        return _config_within_budget(config, world, is_captured=False), ""
    try:
        return _config_within_budget(config, world, is_captured=True), ""
    except ValueError:
        eager = _config_within_budget(config, world, is_captured=False)
    because = f"memory.budget={memory.budget} leaves nothing for a CUDA graph"
    if config.trainer.capture is True:
        raise ValueError(f"trainer.capture=true: {because}; {CAPTURE_ADVICE}")
    return eager, because


def _config_within_budget(config: Config, world: World, is_captured: bool) -> Config:
    """A copy that trains within `memory.budget`, captured or not; the log says why. ValueError: nothing fits."""
    memory = config.memory
    available = memory.available(world.size, is_captured)
    chosen = deepcopy(config)
    if memory.fit:
        chosen = _config_of_resumed_run(config) or fitting_config(config, world.size, is_captured)
    data = chosen.data
    share = crops_per_device(chosen, world.size)
    if config.trainer.recompute == "budget":
        chosen.memory, peak, sum_text = memory_within_budget(chosen, world.size, is_captured)
    else:
        chosen.memory = Memory()
        peak = step_memory(chosen, share, data.crop_size, world.size).peak
        sum_text = size_text(available)
    step = f"{share} crops of {crop_text(data)} pixels on each device need {size_text(peak)}"
    if peak > available:
        raise ValueError(
            f"memory.budget={memory.budget}: {step}, and {size_text(available)} are left for tensors "
            f"{advice.on_memory(config, world.size)}"
        )
    limit = limit_of_images(replace(chosen, memory=memory), world.size)
    if world.device.type == "cpu":
        limit += "; on a CPU nothing enforces it"
    logger.info(
        f"memory.budget={memory.budget}: data.crops_per_minibatch={data.crops_per_minibatch} and "
        f"data.crop_size={data.crop_size}, as {step} of {sum_text}{limit}"
    )
    return chosen


def _config_of_resumed_run(config: Config) -> Config | None:
    """A copy with the numbers that `memory.fit` chose for the run to resume; None if there is no such run."""
    file = Path(str(config.run_dir), "config.yaml")
    if config.resume != "auto" or not file.is_file():
        return None
    name = "crops_per_minibatch" if config.memory.fit == "batch" else "crop_size"
    line = re.search(rf"(?m)^  {name}: (\d{{1,9}})$", file.read_text("utf-8", "replace"))
    if line is None:
        raise ValueError(f"{file} has no number data.{name}, as the configuration of a run has: restore it")
    chosen = deepcopy(config)
    setattr(chosen.data, name, int(line[1]))
    return chosen


def crop_text(data: Data, crop_size: int | None = None) -> str:
    """A crop's height x width as text."""
    return "x".join(map(str, data.crop(crop_size)))
