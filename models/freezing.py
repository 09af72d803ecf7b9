"""Frozen bodies and norms: `body.frozen` and `body.frozen_norms`."""

from collections.abc import Collection

from torch import nn

FROZEN_NORMS = ("none", "statistics", "all")
_STAYS = "stays_in_evaluation"  # an attribute of modules


def freeze(network: nn.Module, trained: Collection[str], body: bool, norms: str) -> None:
    """Freeze a network's body, or only its norms.

    Frozen parameters need no gradient. `training_mode` leaves frozen parts in evaluation mode: norms use their running
    statistics and keep them, and dropout is off. A frozen body saves nothing for the backward pass.

    Args:
        trained: names of the network's top modules that are not its body.
        body: freeze the whole body.
        norms: the body's norms keep their running "statistics", or "all" of them: their scale and shift too.

    ValueError: the norms have nothing to freeze.
    """
    parts = [part for name, part in network.named_children() if name not in trained]
    if body:
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name.partition(".")[0] in trained)
        for part in parts:
            setattr(part, _STAYS, True)
    if norms == "none":
        return
    modules = [module for part in parts for module in part.modules()]
    with_statistics = [module for module in modules if "running_mean" in module._buffers]
    without_statistics = [module for module in modules if isinstance(module, nn.GroupNorm | nn.LayerNorm)]
    if not with_statistics and (norms == "statistics" or not without_statistics):
        raise ValueError(f"frozen_norms={norms}: the body has no norms with running statistics; leave it out")
    for norm in with_statistics:
        setattr(norm, _STAYS, True)
    if norms == "all":
        for norm in (*with_statistics, *without_statistics):
            norm.requires_grad_(False)


def training_mode(network: nn.Module) -> None:
    """Put a network into training mode, except its frozen parts."""
    network.train()
    for module in network.modules():
        if _STAYS in vars(module):
            module.eval()
