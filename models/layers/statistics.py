"""Recompute the running statistics of norms."""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .synchronisation import synchronised_group


class _Norm(Protocol):
    """Any norm with running statistics, ours or PyTorch's."""

    momentum: float | None
    running_mean: Tensor
    running_var: Tensor

    def train(self, mode: bool = True) -> object: ...


@torch.no_grad()
def renew_statistics(
    network: nn.Module, minibatches: Iterable[Tensor], forward: Callable[[Tensor], object] | None = None
) -> None:
    """Recompute the running statistics of all norms as the average over these minibatches.

    Like PyTorch's `update_bn`, but for any kind of norm, and with everything else (e.g. dropout) in eval mode. In
    distributed training every process passes equally many minibatches and gets the average over all of them. Leaves the
    network in eval mode.

    Args:
        forward: calls the network on a minibatch, e.g. under autocast; by default the network itself.
    """
    norms = [module for module in network.modules() if _has_running_statistics(module)]
    momenta = [norm.momentum for norm in norms]
    network.eval()
    for number, minibatch in enumerate(minibatches, start=1):
        for norm in norms:
            norm.train()
            norm.momentum = 1 / number
        (forward or network)(minibatch)
    group = synchronised_group(None)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        for statistics in (norm.running_mean, norm.running_var):
            if group is not None:
                dist.all_reduce(statistics, group=group)
                statistics.div_(dist.get_world_size(group))
    network.eval()


def _has_running_statistics(module: object) -> TypeGuard[_Norm]:
    return getattr(module, "running_mean", None) is not None
