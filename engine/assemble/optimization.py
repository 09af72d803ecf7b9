"""Configuration keys -> optimiser, learning rates, and the schedule of a run."""

from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from datasets import minibatches_per_epoch
from engine.assemble.contracts import builder
from engine.schema import optim as schema
from engine.schema.schedule import Schedule, in_steps
from engine.schema.training import TrainingRun


def optimizer(config: schema.Optim, network: nn.Module, head: tuple[str, ...]) -> Optimizer:
    """The optimiser over all parameters that are not frozen, with their names, which checkpoints hold.

    head: top-level modules whose learning rate is `head_lr_factor` times the body's.
    ValueError: its step needs a closure, or its `state_dict` is not as PyTorch's.
    """
    options = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": config.fused}
    optimizer = builder("optim", config)(_parameter_groups(config, network, head), **options)
    _check_methods(optimizer, config.name)
    if optimizer.defaults.get("dampening"):  # the first gradient is not dampened, but would be with the momentum below
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["fused"] = False
    if isinstance(optimizer, SGD) and optimizer.defaults["fused"]:
        _start_momentum(optimizer)
    return optimizer


def _parameter_groups(config: schema.Optim, network: nn.Module, head: tuple[str, ...]) -> list[dict[str, Any]]:
    """The named parameters that are trained, in groups of the same learning rate and weight decay, the body's first."""
    groups: dict[tuple[float, float], list] = {}  # parameters, by factor of the learning rate and weight decay
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            factor = config.head_lr_factor if name.startswith(tuple(f"{part}." for part in head)) else 1.0
            decays = config.decay == "all" or parameter.ndim > 1
            groups.setdefault((factor, config.weight_decay if decays else 0.0), []).append((name, parameter))
    body_first = sorted(groups.items(), key=lambda group: group[0][0] != 1.0)
    return [
        {"params": parameters, "lr": config.lr * factor, "weight_decay": weight_decay}
        for (factor, weight_decay), parameters in body_first
    ]


def _check_methods(optimizer: Optimizer, name: str) -> None:
    """ValueError: the step of the optimiser optim=NAME needs a closure, or its state dict is not as PyTorch's."""
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ValueError(
            f"optim={name}: {type(optimizer).__name__}.step needs a closure that computes the loss again, which "
            f"trainings do not give; choose an optimiser that steps by its gradients alone, such as optim=adamw"
        )
    missing_parts = {"state", "param_groups"} - optimizer.state_dict().keys()
    if missing_parts:
        lacks = f"{type(optimizer).__name__}.state_dict() lacks {' and '.join(sorted(missing_parts))}"
        advice = "so no checkpoint could be continued: let it add to super().state_dict()"
        raise ValueError(f"optim={name}: {lacks}, {advice}")


def _start_momentum(optimizer: SGD) -> None:
    """Give a fused SGD's parameters a momentum of zero.

    Later its kernel would leave momentum uninitialised if it skips the first step, and PyTorch would refuse a parameter
    that gets its first gradient after others.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def lr_schedule(
    config: schema.LRSchedule, optimizer: Optimizer, schedule: Schedule, smoke: bool = False
) -> LRScheduler:
    """The learning rate of every step, advanced after each.

    ValueError: the warm-up is as long as the run (with `smoke` it is then left out), or the schedule needs a metric.
    """
    warmup = in_steps(config.warmup_epochs, config.warmup_steps, schedule.steps_per_epoch) or 0
    if smoke and warmup >= schedule.total_steps:
        warmup = 0
    if warmup >= schedule.total_steps:
        by_epochs = config.warmup_epochs is not None
        key = f"warmup_epochs={config.warmup_epochs}" if by_epochs else f"warmup_steps={config.warmup_steps}"
        shorter = "lr_schedule.warmup_epochs=null lr_schedule.warmup_steps" if by_epochs else "lr_schedule.warmup_steps"
        raise ValueError(
            f"lr_schedule.{key}: the warm-up takes {warmup:,} steps, and the run has {schedule.total_steps:,}; give "
            f"{shorter}={schedule.total_steps // 10 or 'null'}, or more trainer.steps"
        )
    steps = {"steps": schedule.total_steps - warmup, "steps_per_epoch": schedule.steps_per_epoch, "warmup": warmup}
    scheduler = builder("lr_schedule", config)(optimizer, **steps)
    try:
        signature(scheduler.step).bind()
    except TypeError as error:  # ReduceLROnPlateau
        raise ValueError(
            f"lr_schedule={config.name}: {type(scheduler).__name__}.step: {error}, which trainings do not give; choose "
            f"a schedule of steps alone, such as lr_schedule=cosine"
        ) from error
    if not warmup:
        return scheduler
    rise = LinearLR(optimizer, start_factor=0.01, total_iters=warmup)
    return SequentialLR(optimizer, [rise, scheduler], milestones=[warmup])


def schedule_of(config: TrainingRun, images: int) -> Schedule:
    """The run's schedule in steps, for `images` training images."""
    trainer = config.trainer
    steps_per_epoch = minibatches_per_epoch(images, config.data.crops_per_minibatch)
    total_steps = in_steps(trainer.epochs, trainer.steps, steps_per_epoch)
    assert total_steps is not None, "TrainingRun.check requires epochs or steps"
    return Schedule(
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        evaluate_every=in_steps(trainer.evaluate_every_epochs, trainer.evaluate_every_steps, steps_per_epoch),
        checkpoint_every=trainer.checkpoint_every_steps,
        log_every=trainer.log_every_steps,
        patience=trainer.patience,
    )
