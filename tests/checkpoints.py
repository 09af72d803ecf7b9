"""Checkpoints of networks that were not trained."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.configuration import config as cfg
from engine.schema.training import TrainingRun
from tests.bodies import trained


def saved(file: Path, config: TrainingRun, classes: Sequence[str], **parts: object) -> None:
    """Save what a run of two steps would, with random weights and statistics; `more`: other parts."""
    torch.manual_seed(0)
    network = trained(assemble.network_of(config, len(classes))).float()
    if config.task == "segmentation":
        nn.init.normal_(network.cls.weight)  # or it might predict one class everywhere
    state = {"task": config.task, "step": 2, "config": cfg.plain(config), "classes": list(classes)}
    checkpoint.save(file, {**state, "network": network.state_dict(), **parts})
