"""Checkpoints: everything a run needs to go on, and an evaluation needs to start, in plain containers and tensors."""

import logging
import math
import os
import pickle
import reprlib
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.memory import is_out_of_memory

FORMAT = "inplace-abn-segmentation/1"

logger = logging.getLogger(__name__)


def save(path: Path, state: dict, previous: Path | None = None) -> None:
    """Write `state` to `path`; the checkpoint that was there becomes `previous`, a file beside it, if one is given.

    At any moment at which the process is killed, `path` or, on a filesystem without hard links, `previous` holds a
    complete checkpoint, if one was ever written. What a killed process left goes with the next call. One process writes
    into a folder.

    Raises:
        OSError: the disk is full or not writable. The last good checkpoint is kept, and named.
    """
    unfinished = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob("*.pt.partial"):
            leftover.unlink()
        with open(unfinished, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        _put_in_place(unfinished, path, previous)
    except (OSError, RuntimeError) as error:
        reason = _disk_error(error)
        if reason is None:
            raise
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise OSError(_not_written(path, state, previous, reason)) from error


def _put_in_place(unfinished: Path, path: Path, previous: Path | None) -> None:
    """Rename a complete file to `path`. `previous` is replaced last: until then, it may be the only good one."""
    link = None
    if previous is not None and path.exists():
        link = previous.with_name(previous.name + ".partial")
        try:
            os.link(path, link)
        except OSError:  # a filesystem without hard links: for a moment, there is `previous` alone
            os.replace(path, previous)
            link = None
    os.replace(unfinished, path)
    if link is not None:
        os.replace(link, previous)
    folder = os.open(path.parent, os.O_RDONLY)  # the renames themselves must reach the disk as well
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _disk_error(error: BaseException | None) -> OSError | None:
    """The OSError behind what torch.save raised: its writer may replace it by one about an unexpected position."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _not_written(path: Path, state: dict, previous: Path | None, reason: OSError) -> str:
    return (
        f"checkpoint {path} of step {state.get('step')} cannot be written: {reason.strerror or reason}. It needs "
        f"{_bytes(state):,} bytes, and {what_is_left(path.parent, path, previous)}"
    )


def what_is_left(folder: Path, *checkpoints: Path | None) -> str:
    """The end of a message about a full disk: its free bytes, the first of the checkpoints that is good, what to do."""
    free = "an unknown number of"
    with suppress(OSError):
        free = f"{shutil.disk_usage(folder).free:,}"
    kept = "there is no earlier checkpoint"
    if good := last_good(*checkpoints):
        kept = f"the last good checkpoint is kept: {good[0]}, of step {good[1]}"
    return (
        f"{free} bytes are free there; {kept}. Make room (or raise the quota or limit), then continue with resume=auto"
    )


def last_good(*paths: Path | None) -> tuple[Path, int] | None:
    """The first of the checkpoints that can be read, and its step; None where none can."""
    for path in filter(None, paths):
        with suppress(ValueError):
            return path, load(path)["step"]
    return None


def _bytes(value) -> int:
    """Bytes of all tensors in nested containers: but for some kB, the size of their checkpoint."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return 0
    return sum(map(_bytes, value))


def load(path: Path) -> dict:
    """Read a checkpoint of ours onto the CPU; it cannot carry code (`weights_only`), and every byte is checked.

    Raises:
        ValueError: there is no such file, it is damaged, or it is not a checkpoint of this project.
    """
    return checked(read(path), path)


def checked(state: object, path: Path) -> dict:
    """What `read` gave, if it is a checkpoint of ours with what an evaluation needs in it; else a ValueError."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"checkpoint {path} has format {found!r}: expected {FORMAT!r}, which train_seg.py of this version writes"
        )
    for key, (fits, expected) in _PARTS.items():
        absent = key not in state
        if absent and key in _OPTIONAL:
            continue
        if absent or not fits(state[key]):
            found = f"no {key}" if absent else f"{key}={reprlib.repr(state[key])}"
            raise ValueError(f"checkpoint {path} has {found}: expected {expected}, which train_seg.py writes")
    colours = len(state.get("palette", state["classes"]))
    if colours != len(state["classes"]):
        raise ValueError(
            f"checkpoint {path} has {colours} colours in palette: expected {len(state['classes'])}, as classes"
        )
    return state


def _are(entry_fits: Callable[[object], bool], least: int, most: int) -> Callable[[object], bool]:
    """Whether a value is a sequence of `least` to `most` entries that fit."""
    return lambda value: (
        isinstance(value, (list, tuple)) and least <= len(value) <= most and all(map(entry_fits, value))
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _are_tensors(value: object) -> bool:
    tensors = isinstance(value, dict) and all(isinstance(tensor, Tensor) for tensor in value.values())
    return tensors and all(map(_is_name, value))


def _is_number(value: object, most: float) -> bool:
    return type(value) is int and 0 <= value <= most


# What an evaluation needs of a checkpoint: the test of a value, and what it expects. Class 255 would be "ignored".
_PARTS = {
    "step": (partial(_is_number, most=math.inf), "a number of steps"),
    "config": (lambda value: isinstance(value, dict), "the dictionary of the run's configuration"),
    "classes": (_are(_is_name, 1, 255), "1 to 255 names"),
    "network": (_are_tensors, "a dictionary {name: tensor}"),
    "ema": (_are_tensors, "a dictionary {name: tensor}"),
    "palette": (_are(_are(partial(_is_number, most=255), 3, 3), 1, 255), "an (R, G, B) of 0 to 255 for each class"),
}
_OPTIONAL = ("ema", "palette")  # runs without averaged weights have no ema, older ones no palette


def read(path: Path) -> object:
    """What any program wrote with torch.save, on the CPU; as safe as `load`.

    Raises:
        ValueError: there is no such file, it is damaged, or holds more than plain tensors and containers.
    """
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"checkpoint {path} {found}: expected a file such as RUN_DIR/checkpoints/last.pt")
    zipped = False  # else it was written by PyTorch before 1.6, or is none
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"PK"
        if zipped:
            _check_bytes(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        damaged = "" if zipped else "is not a checkpoint, or is damaged, or "
        raise ValueError(
            f"checkpoint {path} {damaged}contains something else than plain tensors and containers; it is not loaded, "
            f"because it could run code"
        ) from error
    except Exception as error:  # damaged bytes raise almost anything
        raise ValueError(
            f"checkpoint {path} is damaged or cannot be read ({error or type(error).__name__}); others of its run "
            f"may be good: previous.pt, best.pt"
        ) from error


def load_network(
    make: Callable[[], nn.Module], state: dict, classes: tuple[str, ...], source: Path, averaged: bool = True
) -> nn.Module:
    """The network that `make` builds from the checkpoint's configuration, with the checkpoint's weights.

    `averaged`: the averaged ones, where the checkpoint has them.

    Raises:
        ValueError: the network is to predict other classes than it was trained on, or it cannot be built, or parameters
            do not fit.
    """
    trained = tuple(state["classes"])
    if trained != tuple(classes):
        raise ValueError(
            f"checkpoint {source} was trained on {len(trained)} classes ({', '.join(trained[:3])}, …) and the dataset "
            f"has {len(classes)} ({', '.join(classes[:3])}, …): evaluate it on the dataset it was trained on"
        )
    try:
        network = make()
    except (ValueError, RuntimeError, TypeError) as error:  # of PyTorch, where a number is beyond what it can count
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\nException raised from")[0]  # frames of C++
        raise ValueError(f"checkpoint {source}: the network of its configuration cannot be built: {reason}") from error
    try:
        network.load_state_dict(state["ema" if averaged and "ema" in state else "network"])
    except RuntimeError as error:
        raise ValueError(f"checkpoint {source} does not fit the network of its configuration: {error}") from error
    return network


def _check_bytes(path: Path) -> None:
    """Compare the checksums that torch.save writes, which torch.load does not look at. An error tells what is wrong."""
    with zipfile.ZipFile(path) as archive:
        wrong = archive.testzip()
        folders = [entry.filename for entry in archive.infolist() if entry.external_attr & 0x10]
    if wrong is not None:
        raise ValueError(f"the checksum of its part {wrong} is wrong")
    if folders:  # by an attribute without a checksum, for which torch.load would leave a tensor's memory as it was
        raise ValueError(f"its part {folders[0]} is marked as a folder")
