"""Save and restore what the bits of the next steps depend on: random number generators of all ranks, and threads."""

from typing import Any

import torch

from engine.process.console import logger
from engine.process.distributed import World


def random_states(world: World) -> dict[str, Any]:
    """The generators' states by device type and rank, and the first rank's threads. Every rank must call it."""
    on_device = torch.cuda.get_rng_state(world.device) if world.device.type == "cuda" else None
    states = world.gather((torch.get_rng_state(), on_device))
    return {
        "cpu": [cpu for cpu, _ in states],
        "cuda": [cuda for _, cuda in states if cuda is not None],
        "threads": torch.get_num_threads(),
    }


def restore_random_states(states: dict[str, Any], world: World) -> None:
    """Restore this rank's state.

    With another world size or device type the streams cannot continue: new ones are seeded, reproducibly, and a warning
    is logged, as for another number of threads on CPUs.
    """
    saved_size = len(states["cpu"])
    saved_type = "cuda" if states["cuda"] else "cpu"
    if (saved_size, saved_type) != (world.size, world.device.type):
        torch.set_rng_state(states["cpu"][0])
        torch.manual_seed(int(torch.randint(2**62, ())) + world.rank)  # seeds CUDA too
        if world.first:
            logger.warning(
                f"the run was on {saved_size} x {saved_type} and continues on {world.size} x {world.device.type}: at "
                f"the same step with the same samples, but dropout draws other numbers, and unsynchronised norms see "
                f"{saved_size / world.size:.3g} times as many crops"
            )
        return
    torch.set_rng_state(states["cpu"][world.rank])
    if saved_type == "cuda":
        torch.cuda.set_rng_state(states["cuda"][world.rank], world.device)
    elif world.first and states["threads"] != torch.get_num_threads():
        logger.warning(
            f"the run was on {states['threads']} threads and continues on {torch.get_num_threads()}: it rounds "
            f"otherwise; OMP_NUM_THREADS={states['threads']} keeps it bitwise identical"
        )


def ranks_of(state: dict) -> int:
    """How many ranks have trained a checkpoint; 1 for a file without a training."""
    return len(state["random"]["cpu"]) if "random" in state else 1
