"""Read files of torch.save and safetensors, and write the latter."""

import argparse
import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SAFETENSORS = ".safetensors"
_CHECKPOINT = "checkpoint"  # in the metadata of a file: the parts of a checkpoint that are no tensors, as JSON
_NETWORK = "network"  # the part whose tensors have their own names
_TENSOR_PARTS = "tensors"  # beside the parts: the names of those that are tensors


def safetensors_for(name: str) -> Any:
    """The package safetensors, which the file `name` needs. ValueError: it is not installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ValueError(f"{name} needs the package safetensors: pip install safetensors") from error
    return safetensors


def safetensors_bytes(content: Mapping[str, Any], written_by: str) -> bytes:
    """A file of a state dict, or of a checkpoint: its network by name, all that is no tensor in the metadata."""
    metadata = {"format": "pt", "written_by": written_by}
    tensors = {**content}
    if _NETWORK in content:
        tensor_parts = {name: part for name, part in content.items() if isinstance(part, Tensor)}
        plain_parts = {name: part for name, part in content.items() if name not in (_NETWORK, *tensor_parts)}
        metadata[_CHECKPOINT] = json.dumps({**plain_parts, _TENSOR_PARTS: [*tensor_parts]})
        tensors = {**content[_NETWORK], **tensor_parts}
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    return safetensors_for(f"a file of {SAFETENSORS}").torch.save(copies, metadata)


def _read_safetensors(path: Path, package: Any) -> dict[str, Any]:
    """The tensors in a file, or the checkpoint that `safetensors_bytes` made of it."""
    with package.safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    if _CHECKPOINT not in metadata:
        return tensors
    parts = json.loads(metadata[_CHECKPOINT])
    tensor_parts = {name: tensors.pop(name) for name in parts.pop(_TENSOR_PARTS)}
    return {**parts, **tensor_parts, _NETWORK: tensors}


def read(path: Path, name: str, expected: str, if_damaged: str) -> object:
    """Read a file of torch.save, old or new format, onto the CPU. It cannot run code, and all checksums are verified.

    The old format, of PyTorch before 1.6, has none.
    ValueError if it does not exist, is damaged, of another kind, or holds anything but tensors and plain containers.
    Messages contain `name`, `expected` and `if_damaged`.
    """
    if not path.is_file():
        instead = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"{name} {instead}: expected {expected}")
    package = safetensors_for(name) if path.suffix == SAFETENSORS else None
    try:
        if package is not None:
            return _read_safetensors(path, package)
        with open(path, "rb") as file:
            has_checksums = file.read(2) == b"PK"
        if has_checksums:
            _check_bytes(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # torchvision's and timm's scripts save theirs
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes raise almost anything
        raise ValueError(f"{name} {_problem_of_file(path, error, expected, if_damaged)}") from error


def _problem_of_file(path: Path, error: Exception, expected: str, if_damaged: str) -> str:
    """The end of a message that begins with the name of a file, which raised an error while it was read."""
    kind = _other_kind(path)
    if kind:
        return f"is {kind}, not a checkpoint: expected {expected}"
    match = re.search(r"GLOBAL (\S+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and match:
        return (
            f"contains more than tensors and plain containers ({match[1]}): not loaded, because it could run code. If "
            f"you trust it, load it once with torch.load(FILE, weights_only=False) and save only its tensors"
        )
    reason = str(error)
    if not isinstance(error, ValueError):
        with open(path, "rb") as file:
            reason = f"{type(error).__name__}; begins with {file.read(16)!r}"
    return f"is damaged, or no file of torch.save ({reason}): expected {expected}; {if_damaged}"


def _other_kind(path: Path) -> str | None:
    """What a file is if it is whole, but of another program or for another purpose; None: unknown, or damaged."""
    if path.suffix == ".onnx":
        return "an ONNX program"
    with suppress(Exception), zipfile.ZipFile(path) as archive:  # damaged bytes raise almost anything
        parts = {part for name in archive.namelist() for part in name.split("/")}
        if "archive_format" in parts:
            return "a program of torch.export, such as scripts.export makes of a checkpoint"
        return "a program of TorchScript" if {"code", "constants.pkl"} <= parts else None
    with open(path, "rb") as file:
        start = file.read(200)
    if not start or any(byte < 32 and byte not in b"\t\n\r" for byte in start):
        return None
    kind = {".json": "a JSON file", ".yaml": "a YAML file"}.get(path.suffix, "a text")
    return f"{kind} that begins with {start[:30]!r}"


def _check_bytes(path: Path) -> None:
    """Verify the checksums that torch.save writes and torch.load ignores. ValueError names the bad part."""
    with zipfile.ZipFile(path) as archive:
        bad_part = archive.testzip()
        folders = [part.filename for part in archive.infolist() if part.external_attr & 0x10]
    if bad_part is not None:
        raise ValueError(f"its part {bad_part} has a wrong checksum")
    if folders:  # attributes have no checksum, and torch.load would return uninitialised memory
        raise ValueError(f"its part {folders[0]} is marked as a folder")
