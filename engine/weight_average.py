"""Exponential moving average of a network's weights."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """An average of the weights of `network`, updated after every step.

    PyTorch's AveragedModel makes the host wait for the device at every update, and copies all buffers each time.

    Attributes:
        module: a copy of the network with the averaged weights. `take_buffers` gives it the network's buffers.
        updates: their number.
    """

    def __init__(self, network: nn.Module, decay: float):
        self.module = copy.deepcopy(network)
        self.updates = 0
        self._average = get_ema_multi_avg_fn(decay)
        self._buffers_are_old = False

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """average = decay * average + (1 - decay) * weights; the first update copies the weights."""
        own, weights = ([p.detach() for p in each.parameters()] for each in (self.module, network))
        if self.updates:
            self._average(own, weights, self.updates)
        else:
            torch._foreach_copy_(own, weights)
        self.updates += 1
        self._buffers_are_old = True

    @torch.no_grad()
    def take_buffers(self, network: nn.Module) -> None:
        """Copy the buffers of the network (its running statistics), unless there was no update since the last time."""
        if self._buffers_are_old:
            for own, new in zip(self.module.buffers(), network.buffers(), strict=True):
                own.copy_(new, non_blocking=True)
        self._buffers_are_old = False
