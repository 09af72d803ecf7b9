"""What each rank keeps besides the learner: states of parts, such as a sampler or a loss, and of random numbers."""

import io
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datasets.stream import state_of
from engine.process.console import logger
from engine.process.distributed import World
from engine.process.plugins import errors_named
from engine.process.transfers import HostCopy
from models.private_torch import tree_map


def saved_states(parts: Mapping[str, Any], world: World) -> list[dict[str, Any]]:
    """The states of each rank's parts, by name, on the CPU. ValueError: a checkpoint cannot hold a state.

    Every rank must call it.
    """
    states = {name: state_of(part) for name, part in parts.items()}
    states = HostCopy({name: state for name, state in states.items() if state is not None}).wait()
    for name, state in states.items():
        check_savable(name, state)
    return world.gather(states)


def check_savable(name: str, state: Any) -> None:
    """ValueError, naming the part: its state holds what no checkpoint can, as it would not be loaded."""
    stand_in = torch.empty(0)
    without_tensors = tree_map(lambda leaf: stand_in if isinstance(leaf, Tensor) else leaf, state)
    file = io.BytesIO()
    try:
        torch.save(without_tensors, file)
        torch.load(io.BytesIO(file.getbuffer()), weights_only=True)
    except Exception as error:  # a state may be anything
        match = re.search(r"GLOBAL (\S+)", str(error))
        kind = match[1] if match else f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(
            f"{name} has a state_dict of more than tensors, numbers, texts, lists and dictionaries ({kind})"
        ) from error


def restore_states(parts: Mapping[str, Any], saved: list[dict[str, Any]], world: World) -> None:
    """Load the state of each part that this rank saved. ValueError: a part refuses its state.

    If the number of ranks has changed, all ranks load the states of the first. A warning names each part that has no
    state in the checkpoint.
    """
    states = saved[world.rank if len(saved) == world.size else 0]
    for name, part in parts.items():
        if name in states:
            with errors_named(f"{name} does not load its state"):
                part.load_state_dict(states[name])
        elif state_of(part) is not None and world.first:
            logger.warning(f"{name} has a state_dict, and the checkpoint none of it: it begins anew")


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
