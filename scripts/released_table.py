"""The authors' released checkpoints, evaluated: the published scores beside ours. See `scripts.run_table`."""

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from engine.configuration.command_line import composed
from engine.process.console import logger, table_of
from engine.schema.keys import override
from eval import evaluate
from models.checkpoints.released_files import RELEASED_FILES, ReleasedFile, released_file
from scripts.convert_checkpoint import convert

COLUMNS = ("file", "view", "published", "ours", "difference")
# How eval.py makes the views in which the authors give scores.
VIEWS = {"224": (), "ten crops": ("view=ten_crop",), "320": ("crop=320",), "flipped": ("tta.flip=true",)}
SCORES = {"imagenet": ("top1", "top5"), "vistas": ("miou",)}


def released_table(files: Path, roots: Mapping[str, str], runs: Path, console: Console) -> None:
    """Convert every released file in a folder, evaluate it on its data, and print the table.

    What has been converted and evaluated into `runs` before is not done again. `roots`: {"imagenet" or "vistas": DIR};
    files of other data are listed only. ValueError: the folder holds no released file.
    """
    candidates = sorted(path for path in files.rglob("*") if path.is_file())
    found = {path: entry for path in candidates if (entry := released_file(path)) is not None}
    if not found:
        networks = ", ".join(f"{entry.network} ({entry.norm})" for entry in RELEASED_FILES)
        raise ValueError(
            f"files={files}: none of its {len(candidates)} files is a released one, by their md5; expected some of "
            f"{networks}, which the README of the release links"
        )
    rows = []
    for path, entry in found.items():
        for view, percent in entry.scores.items():
            names, root = SCORES[entry.data], roots.get(entry.data)
            theirs = " / ".join(f"{score:.2f}" for score in percent)
            ours, difference = f"needs roots={{{entry.data}: DIR}}", ""
            if root is not None:
                results = _results(path, entry, view, root, runs)
                scores = [100 * results[name] for name in names]
                ours = " / ".join(f"{score:.2f}" for score in scores)
                difference = " / ".join(f"{own - score:+.2f}" for own, score in zip(scores, percent, strict=True))
            rows.append((str(path.relative_to(files)), view, theirs, ours, difference))
            logger.info(f"{entry}, {view}: {ours}")
    console.print(table_of(COLUMNS, rows))
    console.print("ImageNet: top-1 / top-5 in percent, validation images. Vistas: mIoU; published on the test images.")


def _results(path: Path, entry: ReleasedFile, view: str, root: str, runs: Path) -> dict:
    """The results of a view, from an earlier call if there was one."""
    folder = runs / "released" / f"{path.name.split('.')[0]}-{entry.md5[:8]}"
    network, results = folder / "network.pt", folder / f"{view.replace(' ', '_')}.json"
    if not network.is_file():
        files = (override("input", path), override("output", network), override("data.root", root))
        convert(composed("convert_checkpoint", *files))
    if not results.is_file():
        files = (override("checkpoint", network), override("data.root", root), override("results", results))
        evaluate(composed("eval", *files, *VIEWS[view]))
    return json.loads(results.read_text())
