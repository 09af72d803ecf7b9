"""Call and train test networks as runs do."""

import torch
from torch import nn

from engine import assemble
from engine.schema.data import Data
from engine.schema.training import Trainer, TrainingRun
from engine.training.learner import Learner
from models.forward import Forward


def forward_of(
    network: nn.Module,
    precision: str = "float32",
    mean: float = 0.5,
    std: float = 0.25,
    channels_last: bool = True,
    device: str = "cpu",
) -> Forward:
    """A forward pass on `device`; all three colours have `mean` and `std` (0 to 1)."""
    trainer = Trainer(precision=precision, channels_last=channels_last)
    config = TrainingRun(data=Data(mean=[mean, mean, mean], std=[std, std, std]), trainer=trainer)
    return assemble.forward(config, network, torch.device(device))


def learner_of(
    network: nn.Module, lr: float = 0.1, precision: str = "float32", device: str = "cpu", fused: bool = True, **options
) -> Learner:
    """`options`: further fields of the Learner."""
    forward = forward_of(network, precision, channels_last=False, device=device)
    optimizer = torch.optim.SGD(network.parameters(), lr=lr, fused=fused)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    scaler = torch.amp.GradScaler(device, enabled=precision == "float16")
    return Learner(network, forward, optimizer, scheduler, scaler, **options)


def minibatch(
    number: int = 0, crops: int = 4, size: int = 8, device: str = "cpu", channels: int = 3
) -> dict[str, torch.Tensor]:
    """Random images, and labels of five classes."""
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (crops, channels, size, size), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 5, (crops, size, size), dtype=torch.uint8, generator=generator)
    return {"image": images.to(device), "label": labels.to(device)}
