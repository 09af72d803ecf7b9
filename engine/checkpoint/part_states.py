"""What parts of a run keep, such as a sampler or a loss: saved and restored by their `state_dict`, as PyTorch's are."""

import io
from collections.abc import Mapping
from typing import Any

import torch

from datasets.stream import state_of
from engine.process.console import logger
from engine.process.distributed import World
from engine.process.plugins import errors_named
from engine.process.transfers import HostCopy


def saved_states(parts: Mapping[str, Any], world: World) -> list[dict[str, Any]]:
    """The states of each rank's parts, by name, on the CPU. ValueError: a checkpoint cannot hold a state.

    Every rank must call it.
    """
    states = {name: state_of(part) for name, part in parts.items()}
    states = HostCopy({name: state for name, state in states.items() if state is not None}).wait()
    for name, state in states.items():
        with errors_named(f"{name} has a state_dict of more than tensors, numbers, texts, lists and dictionaries"):
            file = io.BytesIO()
            torch.save(state, file)
            torch.load(io.BytesIO(file.getbuffer()), weights_only=True)
    return world.gather(states)


def restore_states(parts: Mapping[str, Any], saved: list[dict[str, Any]], world: World) -> None:
    """Load the state of each part that this rank saved. ValueError: a part refuses its state.

    If the number of ranks has changed, all ranks load the states of the first. A warning names each part that has no
    state in the checkpoint.
    """
    states = saved[world.rank if len(saved) == world.size else 0] if saved else {}
    for name, part in parts.items():
        if name in states:
            with errors_named(f"{name} does not load its state"):
                part.load_state_dict(states[name])
        elif state_of(part) is not None and world.first:
            logger.warning(f"{name} has a state_dict, and the checkpoint none of it: it begins anew")
