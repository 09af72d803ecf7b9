"""Checkpoint files: all that resuming or evaluating a run needs, as tensors in plain containers."""

import difflib
import errno
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn

from datasets.class_names import check_order
from engine.process.console import logger
from engine.process.output_files import NO_INODES, NO_ROOM, explained, partial_file, partial_path, write_file
from engine.schema.training import OF_OTHERS
from models.checkpoints import torch_files
from models.checkpoints.loading import is_auxiliary
from models.private_torch import tree_leaves

FORMAT = "inplace-abn/2"
RESUMED = ("last.pt", "previous.pt")  # what a run continues from, the newest first
BEST = "best.pt"
NEEDED = ("task", "step", "config", "classes", "network")
# palette, label_ids: segmentation. unnamed_classes: `classes` are numbers, because a converted file had no names.
# mean_image: was subtracted from the images.
OPTIONAL = ("palette", "label_ids", "unnamed_classes", "mean_image")
OF_TRAINING = ("total_steps", "best", "scores", "data")  # only to resume a run
_ALONE = "scripts.convert_checkpoint"

_warn_once = cache(logger.warning)


def file_of(place: str) -> Path:
    """The file that a command means: a checkpoint, or the last one of a run directory."""
    path = Path(os.path.expanduser(place))
    return next(filter(Path.is_file, (path / "checkpoints" / "last.pt", path / "last.pt")), path)


def save(path: Path, state: dict, previous: Path | None = None) -> None:
    """Write `state` to `path`. If `previous`, a file in the same folder, is given, the old checkpoint moves there.

    Killing the process at any time leaves a complete checkpoint at `path`, or for a moment only at `previous`, if one
    was ever written. The next call removes partial files, also of other names.

    OSError: the disk is full or not writable. The last good checkpoint is kept, and named.
    """
    for name in (path.name, *RESUMED, BEST):
        partial_path(path.with_name(name)).unlink(missing_ok=True)
    try:
        path.parent.mkdir(exist_ok=True)  # without parents: a run's folder may have been renamed
        with partial_file(path) as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
            if previous is not None and path.exists():
                os.replace(path, previous)
            os.replace(file.name, path)
        _flush_renames(path.parent)
    except (OSError, RuntimeError) as error:
        reason = _os_error_behind(error)
        if reason is None:
            raise
        needed_bytes = sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, Tensor))  # and a few kB
        checkpoints = (*map(path.with_name, RESUMED), path, previous)
        advice = recovery_advice(reason, path.parent, *checkpoints, needed_bytes=needed_bytes)
        words, _ = explained(reason, path.parent)
        message = f"checkpoint {path} of step {state.get('step')} cannot be written: {words}. {advice}"
        raise OSError(message) from error


def write_alone(path: Path, content: dict) -> None:
    """Write a checkpoint or a state dict to `path` by `write_file`. Other files stay."""
    if path.suffix == torch_files.SAFETENSORS:
        write_file(path, torch_files.safetensors_bytes(content, _ALONE))
        return
    content = OrderedDict(content)
    vars(content)["_metadata"] = OrderedDict(written_by=_ALONE)  # where PyTorch keeps the versions of modules
    encoded = BytesIO()
    torch.save(content, encoded)
    write_file(path, encoded.getvalue())


def _os_error_behind(error: BaseException | None) -> OSError | None:
    """The error of the system that is one, or has caused it: torch.save may report an unexpected file position."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _flush_renames(folder: Path) -> None:
    """Flush a folder. A warning says if it cannot be, as on network disks: the file itself is on the disk."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        warn = logger.warning if error.errno == errno.EIO else _warn_once
        warn(f"{folder} cannot be flushed ({error.strerror}): after a power failure a checkpoint may have another name")


def recovery_advice(reason: OSError, folder: Path, *checkpoints: Path | None, needed_bytes: int | None = None) -> str:
    """The end of a message about a file that cannot be written: the last good checkpoint, and what to do.

    Of a full disk it also says how much is free, and of `needed_bytes`.
    """
    good = last_good(*checkpoints)
    if good:
        kept = f"the last good checkpoint is kept: {good[0]}, of step {good[1]}"
    else:
        kept = "there is no earlier checkpoint"
    words, cure = explained(reason, folder)
    cure = f"{cure}, then continue with resume=auto"
    if reason.errno not in NO_ROOM or words == NO_INODES:
        return f"{kept[0].upper()}{kept[1:]}. {cure}"
    free_bytes = "an unknown number of"
    with suppress(OSError):
        free_bytes = f"{shutil.disk_usage(folder).free:,}"
    needs = "" if needed_bytes is None else f"It needs {needed_bytes:,} bytes, and "
    return f"{needs}{free_bytes} bytes are free there; {kept}. {cure}"


def last_good(*paths: Path | None) -> tuple[Path, int] | None:
    """The first readable checkpoint, and its step; None if there is none."""
    for path in filter(None, paths):
        with suppress(ValueError):
            return path, load(path)["step"]
    return None


def load(path: Path) -> dict:
    """Read one of our checkpoints onto the CPU. The file cannot run code (`weights_only`), and every byte is checked.

    ValueError: the file does not exist, is damaged, or is not a checkpoint of this project.
    """
    return checked(read(path), path)


def checked(state: object, path: Path) -> dict:
    """Return a file's content. ValueError unless it is a checkpoint of this project."""
    if not isinstance(state, dict) or "format" not in state:
        raise ValueError(f"checkpoint {path} is not of this project: {OF_OTHERS}")
    if state["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {state['format']!r}: expected {FORMAT!r}, as this version writes"
        )
    return state


def has_ended(state: dict) -> bool:
    """Whether a checkpoint is the end of its run. A file without a training does not say so, and is."""
    return state.get("finished", True)


def read(path: Path) -> object:
    """Read any file written by torch.save onto the CPU. As with `load`, the file cannot run code.

    ValueError: the file does not exist, is damaged, or holds anything but tensors and plain containers.
    """
    expected = "a file such as RUN_DIR/checkpoints/last.pt"
    names_beside = () if path.exists() else (file.name for file in path.parent.glob("*.pt"))
    for name in difflib.get_close_matches(path.name, names_beside, n=1):
        expected = f"{path.with_name(name)}, perhaps"
    return torch_files.read(path, f"checkpoint {path}", expected, advice_if_damaged(path) or "restore it from a copy")


def advice_if_damaged(path: Path) -> str | None:
    """Advice for a damaged file: the other checkpoints of its run; None if there are none."""
    names = *RESUMED, BEST
    if path.name not in names:
        return None
    siblings = [name for name in names if name != path.name and (path.parent / name).is_file()]
    return f"{' or '.join(siblings)} of the same run may be good" if siblings else None


def first_difference(trained: Sequence[str], classes: Sequence[str]) -> str:
    """The first class that the checkpoint and the dataset name differently, for a message."""
    pairs = enumerate(zip_longest(trained, classes, fillvalue="missing"))
    number, (trained_name, name) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    return f"class {number} is {trained_name} in the checkpoint and {name} in the dataset"


def load_network(
    make: Callable[[], nn.Module],
    state: dict,
    classes: Sequence[str],
    source: Path,
    averaged: bool = True,
    order_key: str | None = "class_order",
) -> nn.Module:
    """Build the network of the checkpoint's configuration with `make`, and load the checkpoint's weights.

    `averaged` takes the EMA weights if the checkpoint has them. `order_key`: the key that chooses the order of
    `classes`; None: it was chosen, or there is only one.

    ValueError: `classes` are not the trained ones (only their number counts if the checkpoint has `unnamed_classes`,
    and there must be no doubt about their order), or the weights do not fit.
    """
    _check_classes(state, classes, source, order_key)
    network = make()
    weights = state["ema" if averaged and "ema" in state else "network"]
    try:
        names = network.state_dict().keys()  # without an auxiliary head, which only trainings have
        network.load_state_dict(
            {name: tensor for name, tensor in weights.items() if name in names or not is_auxiliary(name)}
        )
    except RuntimeError as error:
        raise ValueError(f"checkpoint {source} does not fit the network of its configuration: {error}") from error
    return network


def _check_classes(state: dict, classes: Sequence[str], source: Path, order_key: str | None) -> None:
    """ValueError unless a checkpoint was trained on these classes: see `load_network`."""
    trained = tuple(state["classes"])
    if "unnamed_classes" in state and len(trained) == len(classes):
        if trained != tuple(classes):
            check_order(classes, f"checkpoint {source}", order_key)
            logger.info(f"checkpoint {source} does not name its {len(trained)} classes: only their number was compared")
    elif trained != tuple(classes):
        is_sorted_otherwise = order_key is not None and {*trained} == {*classes}
        advice = f"give {order_key}=numbers or text" if is_sorted_otherwise else "evaluate it on its own dataset"
        raise ValueError(
            f"checkpoint {source} was trained on {len(trained)} classes and the dataset has {len(classes)}; "
            f"{first_difference(trained, classes)}: {advice}"
        )
