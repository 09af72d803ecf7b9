"""Minibatch statistics over all processes of a group (the paper's INPLACE-ABN sync)."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_internals import assert_on_device

REFUSED = -math.inf  # sent as the number of values of a rank that refused its input


def check_group(group: object) -> None:
    """ValueError if a value is not a process group, such as a list of devices. `NON_GROUP_MEMBER` is allowed."""
    if group is None or not dist.is_available() or isinstance(group, dist.ProcessGroup):
        return
    if not group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"group={group!r}: expected a process group, as returned by torch.distributed.new_group, or None"
        )


def synchronised_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group to share statistics with (the default group for None), or None if this process is alone.

    ValueError if this process is not a member of the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process group of a synchronised layer: give each rank a group that "
            f"contains it"
        )
    return group if dist.get_world_size(group) > 1 else None


def gathered_moments(mean: Tensor, var: Tensor, count: float, group: dist.ProcessGroup) -> Tensor:
    """The mean and biased variance (C,) and the number of values per channel of every rank: (ranks, 2 C + 1), float64.

    ValueError, on every rank of a group that computes on CPUs: see `check_counts`. On other devices reading the counts
    would make the host wait: see `check_total`.
    """
    ranks = dist.get_world_size(group)
    moments = torch.cat([mean, var, mean.new_full((1,), count, dtype=torch.float64)])  # all become float64
    gathered = moments.new_empty(ranks, len(moments))
    # PyTorch 2.13 renamed all_gather_into_tensor.
    all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    all_gather(gathered.view(-1), moments, group=group)
    if gathered.is_cpu and not torch.compiler.is_compiling():
        check_counts(gathered[:, -1].tolist())
    return gathered


def check_counts(counts: list[float]) -> None:
    """ValueError if a rank refused its input, or if all ranks together have fewer than two values per channel."""
    if REFUSED in counts:
        raise ValueError(
            f"a synchronised norm: rank {counts.index(REFUSED)} of its group refused its input; that rank's own error "
            f"says why"
        )
    if sum(counts) < 2:
        raise ValueError(
            f"a synchronised norm needs at least two values per channel over all ranks of its group, but they have "
            f"{[int(count) for count in counts]}: give it more crops, or call .eval() on this layer to use its "
            f"running statistics"
        )


def check_total(total: Tensor) -> None:
    """Raise the error of `check_counts` without a wait, where `gathered_moments` does not.

    `total`: (), values per channel over all ranks; 0 if they are too few or a rank refused its input. On a device the
    assertion runs there. It ends the process's use of the device, so no rank waits for one that has left.
    """
    if not total.is_cpu or torch.compiler.is_compiling():
        assert_on_device(
            total,
            "a synchronised norm: a rank of its group refused its input (that rank's own error says why), or all ranks "
            "together have fewer than two values per channel",
        )


def refuse_jointly(channels: int, device: torch.device, group: dist.ProcessGroup) -> None:
    """Make the ranks waiting in `gathered_moments` raise, before this rank raises its own error."""
    zeros = torch.zeros(channels, device=device)
    try:
        gathered_moments(zeros, zeros, REFUSED, group)
    except ValueError:
        pass


def joint_sums(sums: tuple[Tensor, Tensor], group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Both vectors (C,) summed over all ranks of a group, as new tensors."""
    joint = torch.stack(sums)
    dist.all_reduce(joint, group=group)
    first, second = joint.unbind()
    return first, second
