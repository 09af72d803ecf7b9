"""Read the results of trainings, evaluations and predictions in a folder as plain values, and compare two folders.

Imports nothing of this project, so it reads the results of any version.
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

# {prefix of names in a checkpoint: column}
PARTS = {
    "network.": "weights",
    "ema.": "averages",
    "optimizer.state.": "momenta",
    "random.": "random states",
    "config.": "configuration",
}
COLUMNS = (*PARTS.values(), "rest of checkpoints", "metrics.jsonl", "results.json", "tensorboard", "files")
IGNORED_METRICS = ("images_per_second", "peak_memory_mib", "data_wait_s", "exchange_wait_s", "mfu")

logging.getLogger("tensorboard").setLevel(logging.ERROR)  # otherwise it warns about every resumed run


class Column(NamedTuple):
    """One column of a comparison."""

    total: int  # names in either folder
    different: list[str]  # a line for each name whose values differ


def contents(folder: Path) -> dict[str, dict[str, object]]:
    """Read all files below a folder: {column: {name: value}}.

    Tensors, pictures and files of other kinds become hashes. Left out: `IGNORED_METRICS`, the environment in
    results.json, the content of log.txt, and the text in TensorBoard, which repeats config.yaml.
    """
    found: dict[str, dict[str, object]] = {column: {} for column in COLUMNS}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.name == "tensorboard":
            found["tensorboard"].update(leaves(_tensorboard(path), name))
        if path.is_dir() or path.parent.name == "tensorboard":  # event files are named after time and machine
            continue
        found["files"][name] = "present"
        if path.suffix == ".pt":
            for key, value in leaves(torch.load(path, map_location="cpu", weights_only=True)):
                column = next((PARTS[part] for part in PARTS if key.startswith(part)), "rest of checkpoints")
                found[column][f"{name} {key}"] = value
        elif path.name == "metrics.jsonl":
            records = map(json.loads, path.read_text().splitlines())
            # Where a killed run continues depends on the moment at which it was killed.
            for number, record in enumerate((r for r in records if r.get("kind") != "resumed"), start=1):
                kept = {key: value for key, value in record.items() if key not in IGNORED_METRICS}
                found["metrics.jsonl"].update(leaves(kept, f"{name} line {number}"))
        elif path.name.startswith("results") and path.suffix == ".json":
            results = json.loads(path.read_text())
            results.pop("environment", None)
            found["configuration"].update(leaves(results.pop("config", None), f"{name} config"))
            found["results.json"].update(leaves(results, name))
        elif path.name == "config.yaml":
            command, text = path.read_text().split("\n", 1)
            found["configuration"][f"{name}.command"] = command
            found["configuration"].update(leaves(OmegaConf.to_container(OmegaConf.create(text)), name))
        elif path.name != "log.txt":
            found["files"][name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted name, value) for every leaf of nested containers; a tensor becomes its dtype, shape and hash."""
    if isinstance(value, (dict, list, tuple)) and value:
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Tensor):
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        yield name, f"{value.dtype} {list(value.shape)} {hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]}"
    else:
        yield name, value


def _tensorboard(folder: Path) -> dict[str, object]:
    """{tag: [(step, value)]} of scalars and pictures, {tag: "text"} of texts."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    found: dict[str, object] = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]
    }
    for tag in tags["images"]:
        found[tag] = [(e.step, hashlib.sha256(e.encoded_image_string).hexdigest()[:16]) for e in events.Images(tag)]
    found.update({tag: "text" for tag in tags["tensors"]})
    return {tag: value for tag, value in found.items() if not tag.endswith(IGNORED_METRICS)}


def compare_folders(old: Path, new: Path) -> dict[str, Column]:
    """Compare column by column. In texts, the parents of `old` and `new` count as the same folder."""
    before, after = contents(old), contents(new)
    compared = {}
    for column in COLUMNS:
        names = {**before[column], **after[column]}
        lines = []
        for name in names:
            texts = [_text(values[column], name, (old.parent, new.parent)) for values in (before, after)]
            if texts[0] != texts[1]:
                lines.append(f"{name}: {texts[0]} → {texts[1]}")
        compared[column] = Column(len(names), lines)
    return compared


def _text(values: dict[str, object], name: str, folders: tuple[Path, Path]) -> str:
    """Equal texts mean equal bits: 1 is not 1.0, 0.0 is not -0.0, and NaN is NaN."""
    if name not in values:
        return "missing"
    text = repr(values[name])
    for folder in folders:
        text = text.replace(str(folder), "DIR")
    return text
