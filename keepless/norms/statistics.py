"""Recompute the running statistics of norms, or keep forward passes from changing them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..inputs import check_module
from .synchronisation import synchronised_group

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)  # PyTorch's

Minibatch = TypeVar("Minibatch")


@torch.no_grad()
def renew_statistics(
    network: nn.Module, minibatches: Iterable[Minibatch], forward: Callable[[Minibatch], object] | None = None
) -> None:
    """Recompute the running statistics of all norms as the average over their calls with these minibatches.

    Use it in place of PyTorch's `update_bn`, which silently skips our layers. Meanwhile everything but the norms (e.g.
    dropout) is in eval mode. In distributed training every process must pass the same number of minibatches, and gets
    the average over all processes. Norms that are not called keep their statistics. Leaves the network in eval mode.

    Args:
        minibatches: the network's inputs, on its device; or anything that `forward` takes.
        forward: calls the network on a minibatch, e.g. `lambda pair: network(pair[0])` for a loader of images and
            labels, or under autocast; by default the network itself.

    ValueError: there is no minibatch.
    """
    check_module(network, "renew_statistics")
    norms: list[Any] = [module for module in network.modules() if has_running_statistics(module)]
    momenta = [norm.momentum for norm in norms]
    calls = dict.fromkeys(norms, 0)

    def weigh(norm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before a call: give the norm's calls up to this one equal weights, and old statistics none."""
        x = args[0] if args else next(iter(kwargs.values()))
        if not x.numel() and not (getattr(norm, "sync", False) and synchronised_group(norm.group)):
            return  # it has no statistics
        calls[norm] += 1
        norm.momentum = 1 / calls[norm]
        if calls[norm] == 1:
            _make_replaceable(norm)

    network.eval()
    minibatch_count = 0
    hooks = [norm.register_forward_pre_hook(weigh, with_kwargs=True) for norm in norms]
    try:
        for minibatch_count, minibatch in enumerate(minibatches, start=1):
            for norm in norms:
                norm.training = True
                norm.momentum = 1 / minibatch_count  # for compiled norms, which do not call new hooks
            (forward or network)(minibatch)
    finally:
        for hook in hooks:
            hook.remove()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        network.eval()
    if not minibatch_count:
        raise ValueError("renew_statistics got no minibatch, so all statistics are old: is a generator used up?")
    _average_over_ranks(norms)


def _make_replaceable(norm: Any) -> None:
    """Let a call with a momentum of 1 replace a norm's statistics (NaN would stay), and count from there on."""
    for statistics in (norm.running_mean, norm.running_var):
        statistics.nan_to_num_(0, 0, 0)
    if getattr(norm, "num_batches_tracked", None) is not None:
        norm.num_batches_tracked.zero_()


def _average_over_ranks(norms: Iterable[Any]) -> None:
    """Replace the running statistics of norms by their averages over all processes, if there are several."""
    group = synchronised_group(None)
    if group is None:
        return
    for norm in norms:
        for statistics in (norm.running_mean, norm.running_var):
            dist.all_reduce(statistics, group=group)
            statistics.div_(dist.get_world_size(group))


def has_running_statistics(module: object) -> bool:
    """Whether a module is a norm with running statistics, ours or PyTorch's."""
    return getattr(module, "running_mean", None) is not None and hasattr(module, "momentum")  # a frozen norm has none


@contextmanager
def statistics_kept(*modules: nn.Module) -> Iterator[None]:
    """Context in which forward passes of some modules do not change the running statistics of their norms."""
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    with state_kept(part for part in parts if part.training and has_running_statistics(part)):
        yield


@contextmanager
def state_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which modules use copies of their buffers, and of attributes such as lists."""
    attributes: dict[nn.Module, dict[str, Any]] = {}
    copies: dict[Tensor, Tensor] = {}
    for module in modules:
        attributes[module] = {
            name: copy(value) if isinstance(value, (dict, list, set)) else value for name, value in vars(module).items()
        }
        attributes[module]["_buffers"] = {
            name: None if buffer is None else copies.setdefault(buffer, buffer.detach().clone())
            for name, buffer in module._buffers.items()
        }
    with with_attributes(attributes):
        yield


@contextmanager
def with_attributes(attributes: Mapping[nn.Module, dict[str, Any]]) -> Iterator[None]:
    """Context in which modules have other attributes, buffers among them; they get their own back at the end."""
    previous_attributes = {module: vars(module) for module in attributes}
    try:
        for module, new_values in attributes.items():
            object.__setattr__(module, "__dict__", new_values)
        yield
    finally:
        for module, previous_values in previous_attributes.items():
            object.__setattr__(module, "__dict__", previous_values)
