"""Checkpoints: everything a run needs to go on, and an evaluation needs to start, in plain containers and tensors."""

import os
import pickle
import zipfile
from pathlib import Path

import torch
from torch import nn

FORMAT = "inplace-abn-segmentation/1"


def save(path: Path, state: dict) -> None:
    """Write `state` so that `path` holds, at any moment, either the previous checkpoint or the new one, complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        torch.save({"format": FORMAT, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)  # the rename itself must reach the disk as well
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path) -> dict:
    """Read a checkpoint of ours onto the CPU; it cannot carry code (`weights_only`).

    Raises:
        ValueError: there is no such file, it is damaged, or it is not a checkpoint of this project.
    """
    if not path.is_file():
        raise ValueError(f"checkpoint {path} does not exist: expected a file such as RUN_DIR/checkpoints/last.pt")
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is not a checkpoint, or is damaged: expected a file that train_seg.py wrote; use another, such as "
            f"best.pt of the run"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"checkpoint {path} contains something else than plain tensors and containers; it is not loaded, because "
            f"it could run code"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {error}; use another checkpoint of the run") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"checkpoint {path} has format {found!r}: expected {FORMAT!r}, which train_seg.py of this version writes"
        )
    return state


def load_network(network: nn.Module, state: dict, classes: tuple[str, ...], source: Path) -> None:
    """Put the weights of a checkpoint into a network built from the checkpoint's configuration.

    Raises:
        ValueError: the network is to predict other classes than it was trained on, or parameters do not fit.
    """
    trained = tuple(state["classes"])
    if trained != tuple(classes):
        raise ValueError(
            f"checkpoint {source} was trained on {len(trained)} classes ({', '.join(trained[:3])}, …) and the dataset "
            f"has {len(classes)} ({', '.join(classes[:3])}, …): evaluate it on the dataset it was trained on"
        )
    try:
        network.load_state_dict(state["network"])
    except RuntimeError as error:
        raise ValueError(f"checkpoint {source} does not fit the network of its configuration: {error}") from error


def run_state(
    network: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, step: int
) -> dict:
    """What a run needs to go on after `step` steps.

    Raises:
        FloatingPointError: a weight or statistic is not finite. A checkpoint of such a network is of no use.
    """
    broken = [name for name, tensor in network.state_dict().items() if not tensor.isfinite().all()]
    if broken:
        raise FloatingPointError(
            f"after step {step}, {len(broken)} tensors are not finite, {broken[0]} among them; "
            f"checkpoints, if any, are of earlier steps: try a lower optim.lr, or trainer.precision=float32"
        )
    return {
        "step": step,
        "network": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": {  # dropout draws from these
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        },
    }


def restore_run(
    state: dict,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> int:
    """Put a `run_state` back; returns the number of steps done."""
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["random"]["cpu"])
    if len(state["random"]["cuda"]) == torch.cuda.device_count():  # else the run moved to another machine
        torch.cuda.set_rng_state_all(state["random"]["cuda"])
    return state["step"]
