"""Minibatch statistics over all processes of a group (the paper's INPLACE-ABN sync)."""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_internals import is_capturing

# By process group: this process's numbers of values per channel that were already checked with the other ranks'.
_CHECKED: WeakKeyDictionary[dist.ProcessGroup, set[int]] = WeakKeyDictionary()


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


def gathered_moments(mean: Tensor, var: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """The mean and biased variance (C,) and the number of values per channel of every rank: (ranks, 2 C + 1), float64.

    Reading the other ranks' counts waits for the device, so they are checked once for each number of values on this
    rank, and never in compiled or captured graphs, which cannot raise. If another rank gets too few values later, only
    that rank raises, and this one loses its connection.

    ValueError, on every rank of the group that checks, if a rank has fewer than two values per channel.
    """
    ranks = dist.get_world_size(group)
    own = torch.cat([mean, var, mean.new_full((1,), count, dtype=torch.float64)])  # all become float64
    gathered = own.new_empty(ranks, len(own))
    # PyTorch 2.13 renamed all_gather_into_tensor.
    all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    all_gather(gathered.view(-1), own, group=group)
    if not torch.compiler.is_compiling() and not (mean.is_cuda and is_capturing()):
        checked = _CHECKED.setdefault(group, set())
        if count not in checked:
            _check_counts(gathered[:, -1].tolist())
            checked.add(count)
    return gathered


def refuse_jointly(channels: int, device: torch.device, group: dist.ProcessGroup) -> None:
    """Make the ranks waiting in `gathered_moments` raise, before this rank raises its own error."""
    nothing = torch.zeros(channels, device=device)
    try:
        gathered_moments(nothing, nothing, 0, group)
    except ValueError:
        pass


def joint_sums(sums: tuple[Tensor, Tensor], group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Both vectors (C,) summed over all ranks of a group, as new tensors."""
    joint = torch.stack(sums)
    dist.all_reduce(joint, group=group)
    first, second = joint.unbind()
    return first, second


def _check_counts(counts: list[float]) -> None:
    short = {rank: int(count) for rank, count in enumerate(counts) if count < 2}
    if short:
        listed = ", ".join(f"rank {rank} has {count}" for rank, count in short.items())
        raise ValueError(
            f"a synchronised norm needs at least two values per channel on every rank of its group, but {listed}: "
            f"give every device at least two crops (a head's pooled branch has one value per crop), or call "
            f".eval() on this layer to use its running statistics"
        )
