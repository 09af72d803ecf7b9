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


def restore_random_states(states: Any, world: World) -> None:
    """Restore this rank's state.

    With another world size or device type the streams cannot continue: new ones are seeded, reproducibly, and a warning
    is logged, as for another number of threads on CPUs. ValueError: `states` are not from `random_states`.
    """
    try:
        cpu = states["cpu"]
        cuda = states["cuda"]
        saved_threads = states["threads"]
        saved_devices = len(cpu), "cuda" if cuda else "cpu"
        devices = world.size, world.device.type
        torch.set_rng_state(cpu[world.rank if saved_devices == devices else 0])
        if saved_devices == devices and cuda:
            torch.cuda.set_rng_state(cuda[world.rank], world.device)
    except (TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise ValueError("it has no states of random number generators") from error
    if saved_devices == devices:
        threads = torch.get_num_threads()
        if world.first and not cuda and saved_threads != threads:
            logger.warning(
                f"the run was on {saved_threads} threads and continues on {threads}: it rounds otherwise; "
                f"OMP_NUM_THREADS={saved_threads} keeps it bitwise identical"
            )
        return
    torch.manual_seed(int(torch.randint(2**62, ())) + world.rank)  # seeds CUDA too
    if world.first:
        logger.warning(
            f"the run was on {len(cpu)} x {saved_devices[1]} and continues on {world.size} x {world.device.type}: at "
            f"the same step with the same samples, but dropout draws other numbers, and unsynchronised norms see "
            f"{len(cpu) / world.size:.3g} times as many crops"
        )


def ranks_of(states: Any) -> int:
    """How many ranks `random_states` are of; 1 if there are none."""
    cpu = states.get("cpu") if isinstance(states, dict) else None
    return len(cpu) if isinstance(cpu, list) and cpu else 1
