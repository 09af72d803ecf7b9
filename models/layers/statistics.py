"""Running statistics of norms, computed anew."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .synchronisation import synchronised_group


@torch.no_grad()
def renew_statistics(
    network: nn.Module, minibatches: Iterable[Tensor], forward: Callable[[Tensor], object] | None = None
) -> None:
    """Running statistics of all norms from these minibatches alone, each with the same weight.

    PyTorch's `update_bn` for norms of any kind; everything else (dropout) works as in an evaluation. Each of several
    processes gives its own minibatches, as many as the others, and gets the average of all. Ends in eval mode.

    Args:
        forward: calls the network with a minibatch, under autocast say; the network itself by default.
    """
    norms = [m for m in network.modules() if getattr(m, "running_mean", None) is not None]
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
