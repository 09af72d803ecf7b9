"""Save and restore the random number generators of all ranks, which dropout draws from."""

import torch
from torch import Tensor

from engine.checkpoint.comparison import described
from engine.console import logger
from engine.distributed import World
from models.checkpoints.torch_files import is_plain


def random_states(world: World) -> dict[str, list[Tensor]]:
    """The generators' states by device type and rank. Every rank must call it."""
    on_device = torch.cuda.get_rng_state(world.device) if world.device.type == "cuda" else None
    states = world.gather((torch.get_rng_state(), on_device))
    return {"cpu": [cpu for cpu, _ in states], "cuda": [cuda for _, cuda in states if cuda is not None]}


def restore_random_states(states: object, world: World) -> None:
    """Restore this rank's state.

    With another world size or device type the streams cannot continue: new ones are seeded, reproducibly, and a warning
    is logged. ValueError: `states` are not what `random_states` returned.
    """
    cpu, cuda = (states.get(kind) if isinstance(states, dict) else None for kind in ("cpu", "cuda"))
    own = torch.get_rng_state()
    if not isinstance(cpu, list) or not cpu or not all(described(state) == described(own) for state in cpu):
        raise ValueError("it has no states of random number generators")
    if not isinstance(cuda, list) or not all(is_plain(state) and state.dtype == torch.uint8 for state in cuda):
        raise ValueError("it has no states of CUDA's random number generators")
    before, now = (len(cpu), "cuda" if cuda else "cpu"), (world.size, world.device.type)
    if before == now:
        torch.set_rng_state(cpu[world.rank])
        if cuda:
            torch.cuda.set_rng_state(cuda[world.rank], world.device)
        return
    torch.set_rng_state(cpu[0])
    torch.manual_seed(int(torch.randint(2**62, ())) + world.rank)  # seeds CUDA too
    if world.first:
        logger.warning(
            f"the run was on {before[0]} x {before[1]} and continues on {now[0]} x {now[1]}: at the same step with the "
            f"same samples, but dropout draws other numbers, and unsynchronised norms see "
            f"{before[0] / now[0]:.3g} times as many crops"
        )
