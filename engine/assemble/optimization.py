"""Configuration keys -> optimiser, learning rates, and the schedule of a run."""

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from datasets import minibatches_per_epoch
from engine.assemble.contracts import builder
from engine.schema import optim as schema
from engine.schema.schedule import Schedule, in_steps
from engine.schema.training import TrainingRun


def optimizer(config: schema.Optim, network: nn.Module, head: tuple[str, ...]) -> Optimizer:
    """The optimiser over all parameters that are not frozen, with their names, which checkpoints hold.

    head: top-level modules whose learning rate is `head_lr_factor` times the body's.
    """
    by_rate: dict[tuple[float, float], list] = {}  # parameters, by factor of the learning rate and weight decay
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            factor = config.head_lr_factor if name.startswith(tuple(f"{part}." for part in head)) else 1.0
            decays = config.decay == "all" or parameter.ndim > 1
            by_rate.setdefault((factor, config.weight_decay if decays else 0.0), []).append((name, parameter))
    body_first = sorted(by_rate.items(), key=lambda group: group[0][0] != 1.0)
    groups = [{"params": own, "lr": config.lr * factor, "weight_decay": w} for (factor, w), own in body_first]
    options = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": config.fused}
    made = builder("optim", config)(groups, **options)
    # Zeros, which PyTorch would leave uninitialised if a fused optimiser skips its first step. Checkpoints have
    # them for every parameter, also for one without a gradient so far.
    for parameter in network.parameters() if config.moments() else ():
        if parameter.requires_grad:
            for name in config.moments():
                made.state[parameter][name] = torch.zeros_like(parameter)
                if name == "step":  # not `zeros`: a plan on fake tensors reads the count, which only a constant allows
                    made.state[parameter][name] = torch.tensor(0.0, device=parameter.device if config.fused else None)
    return made


def lr_schedule(
    config: schema.LRSchedule, optimizer: Optimizer, schedule: Schedule, smoke: bool = False
) -> LRScheduler:
    """The learning rate of every step, advanced after each.

    ValueError: the warm-up is as long as the run. (With `smoke` it is then left out.)
    """
    warmup = in_steps(config.warmup_epochs, config.warmup_steps, schedule.steps_per_epoch) or 0
    if smoke and warmup >= schedule.total_steps:
        warmup = 0
    if warmup >= schedule.total_steps:
        by_epochs = config.warmup_epochs is not None
        given = f"warmup_epochs={config.warmup_epochs}" if by_epochs else f"warmup_steps={config.warmup_steps}"
        shorter = "lr_schedule.warmup_epochs=null lr_schedule.warmup_steps" if by_epochs else "lr_schedule.warmup_steps"
        raise ValueError(
            f"lr_schedule.{given}: the warm-up takes {warmup:,} steps, and the run has {schedule.total_steps:,}; give "
            f"{shorter}={schedule.total_steps // 10 or 'null'}, or more trainer.steps"
        )
    steps = {"steps": schedule.total_steps - warmup, "steps_per_epoch": schedule.steps_per_epoch, "warmup": warmup}
    made = builder("lr_schedule", config)(optimizer, **steps)
    if not warmup:
        return made
    rise = LinearLR(optimizer, start_factor=0.01, total_iters=warmup)
    return SequentialLR(optimizer, [rise, made], milestones=[warmup])


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
