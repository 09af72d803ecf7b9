"""Learning rate schedules after the warm-up: see the contract of `lr_schedule` in `engine.assemble.contracts`.

`steps` counts the steps after the warm-up, `warmup` those of the warm-up; `steps_per_epoch` converts epochs.
"""

from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, PolynomialLR


def poly(optimizer: Optimizer, steps: int, steps_per_epoch: int, warmup: int, *, power: float) -> LRScheduler:
    """(1 - step / steps)^power (paper, section 4.2)."""
    return PolynomialLR(optimizer, total_iters=steps, power=power)


def linear(optimizer: Optimizer, steps: int, steps_per_epoch: int, warmup: int, *, end: float) -> LRScheduler:
    """From the optimiser's rate to `end`. ValueError: `end` is higher."""
    _check_end(end, optimizer)
    end_factor = end / optimizer.param_groups[0]["lr"]
    return LinearLR(optimizer, start_factor=1.0, end_factor=end_factor, total_iters=steps)


def cosine(optimizer: Optimizer, steps: int, steps_per_epoch: int, warmup: int, *, end: float) -> LRScheduler:
    """Half a cosine from the optimiser's rate to `end`. ValueError: `end` is higher."""
    _check_end(end, optimizer)
    return CosineAnnealingLR(optimizer, T_max=steps, eta_min=end)


def multistep(
    optimizer: Optimizer,
    steps: int,
    steps_per_epoch: int,
    warmup: int,
    *,
    factor: float,
    epochs: Sequence[int] | None,
    milestones: Sequence[int] | None,
) -> LRScheduler:
    """Times `factor` after these epochs, or after `milestones`, in steps of the run. ValueError: within the warm-up."""
    falls = milestones or [epoch * steps_per_epoch for epoch in epochs or ()]
    if falls and falls[0] <= warmup:
        raise ValueError(
            f"lr_schedule=multistep: the rate falls after step {falls[0]}, within the warm-up of {warmup} steps; "
            f"expected later"
        )
    return MultiStepLR(optimizer, [step - warmup for step in falls], gamma=factor)


def _check_end(end: float, optimizer: Optimizer) -> None:
    """ValueError: the last rate is above the highest."""
    highest = optimizer.param_groups[0]["lr"]
    if end > highest:
        raise ValueError(f"lr_schedule.end={end}: expected at most optim.lr={highest:g}")
