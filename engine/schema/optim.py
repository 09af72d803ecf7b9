"""Keys of optimisers and learning rate schedules."""

from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from engine.schema.keys import choice, key


@dataclass
class Optim:
    """Options of every optimiser.

    One with `fused=True` in its `defaults` skips a step by PyTorch's flag `found_inf`; for others the host waits to
    know whether the gradient is finite.
    """

    name: str = MISSING
    # The highest learning rate, which lr_schedule lowers. SGD: 0.0025 from trained weights, 0.05 to 0.1 from random
    # ones; AdamW: 0.001. With half the crops per minibatch, halve it (SGD); also if the loss diverges.
    lr: float = key(MISSING, above=0)
    weight_decay: float = key(1e-4, least=0)  # strength of weight decay
    # What decays: all parameters (in-place ABN), or only the weights of convolutions and linear layers (RevNet).
    decay: str = key("all", one_of=("all", "weights"))
    head_lr_factor: float = key(1.0, above=0)  # learning rate of head and classifier, relative to the body's
    max_gradient_norm: float | None = key(None, above=0)  # clip the gradient to this norm; null: never
    fused: bool = True  # fused kernels, which pass over each parameter once
    called_with: ClassVar[tuple[str, ...]] = ("params", "lr", "weight_decay", "fused")


@choice("optim")
class SGD(Optim):
    name: str = "sgd"
    momentum: float = key(0.9, least=0, most=1)  # how much of the last step's change each step keeps
    nesterov: bool = False  # Nesterov's form of momentum

    builds: ClassVar[str] = "torch.optim.SGD"

    def check(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("optim.nesterov=true with optim.momentum=0: give a momentum above 0, or nesterov=false")


@choice("optim")
class AdamW(Optim):
    name: str = "adamw"
    # Decay of the averages of the gradient and of its square.
    betas: list[float] = key([0.9, 0.999], least=0, most=1, entries=("of the gradient", "of its square"))

    builds: ClassVar[str] = "torch.optim.AdamW"

    def more(self) -> dict[str, Any]:
        return {"betas": tuple(self.betas)}

    def check(self) -> None:
        if 1 in self.betas:
            raise ValueError(f"optim.betas={self.betas}: expected numbers below 1, such as 0.999")


@dataclass
class LRSchedule:
    """The learning rate of every step; the highest is optim.lr."""

    name: str = MISSING
    # Epochs of warm-up, in which the rate rises linearly from lr / 100 to lr; or give warmup_steps.
    warmup_epochs: int | None = key(None, above=0)
    warmup_steps: int | None = key(None, above=0)  # steps of warm-up; or give warmup_epochs
    called_with: ClassVar[tuple[str, ...]] = ("optimizer", "steps", "steps_per_epoch", "warmup")

    def check(self) -> None:
        if self.warmup_epochs is not None and self.warmup_steps is not None:
            warmups = f"lr_schedule.warmup_epochs={self.warmup_epochs} and lr_schedule.warmup_steps={self.warmup_steps}"
            raise ValueError(f"{warmups}: give null for one of them")


@choice("lr_schedule")
class Poly(LRSchedule):
    name: str = "poly"  # (1 - step / steps)^power
    power: float = key(0.9, least=0)  # exponent of the share of steps that are left
    builds: ClassVar[str] = "engine.assemble.lr_schedules.poly"


@choice("lr_schedule")
class Linear(LRSchedule):
    name: str = "linear"
    end: float = key(1e-6, above=0)  # the body's learning rate after the last step
    builds: ClassVar[str] = "engine.assemble.lr_schedules.linear"


@choice("lr_schedule")
class Cosine(LRSchedule):
    name: str = "cosine"
    end: float = key(0.0, least=0)  # learning rate after the last step
    builds: ClassVar[str] = "engine.assemble.lr_schedules.cosine"


@choice("lr_schedule")
class MultiStep(LRSchedule):
    name: str = "multistep"
    factor: float = key(0.1, above=0, most=1)  # multiplies the rate after each of these epochs or steps
    epochs: list[int] | None = key(None, above=0)  # epochs after which the rate changes; or give steps
    steps: list[int] | None = key(None, above=0, is_argument=False)  # steps after which the rate changes
    builds: ClassVar[str] = "engine.assemble.lr_schedules.multistep"

    def more(self) -> dict[str, Any]:
        return {"milestones": self.steps}

    def check(self) -> None:
        super().check()
        if self.epochs is not None and self.steps is not None:
            falls = f"lr_schedule.epochs={self.epochs} and lr_schedule.steps={self.steps}"
            raise ValueError(f"{falls}: give null for one of them")
        if self.epochs is None and self.steps is None:
            raise ValueError("lr_schedule.epochs and lr_schedule.steps are both null: give one of them")
        for name, values in (("epochs", self.epochs), ("steps", self.steps)):
            if values is not None and sorted(set(values)) != values:
                raise ValueError(f"lr_schedule.{name}={values}: expected rising numbers")
