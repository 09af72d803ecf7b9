"""Run the same short commands in two checkouts of this project, and name every result that differs by a bit:

    python -m scripts.evidence.compare_checkouts old=DIR new=DIR camvid=DIR out=FILE.md
    python -m scripts.evidence.compare_checkouts old=DIR new=. camvid=DIR out=FILE.md     # with the checkout at hand
    python -m scripts.evidence.compare_checkouts old=. new=. camvid=DIR out=FILE.md       # are the commands repeatable?

Run it before and after a restructuring; `camvid` is that dataset's folder. Compares checkpoints, metrics, results,
configurations and predictions; not times, memory, hardware, logs, locks and TensorBoard. Exit status 1: some do.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import MISSING, DictConfig
from PIL import Image

from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.output_files import write_file

TRAIN = (
    "train_seg.py data.crop_size=64 data.crops_per_minibatch=4 data.workers=0 trainer.steps=6 trainer.device=cpu "
    "trainer.evaluate_every_steps=3 trainer.log_every_steps=1 trainer.deterministic=true run_dir={here}"
)
TWO = "-m torch.distributed.run --standalone --nproc-per-node 2"
COMMANDS = (
    f"{TRAIN}/inplace norm=inplace_1 optim.max_gradient_norm=1",
    f"{TRAIN}/std norm=std data.workers=1",
    f"{TRAIN}/bfloat16 trainer.precision=bfloat16 norm.backend=compiled",
    f"{TRAIN}/float16 trainer.precision=float16",
    f"{TRAIN}/parts trainer.accumulation_steps=2 norm=checkpoint data.colour_jitter.hue=0.1 loss=cross_entropy",
    f"{TRAIN}/camvid experiment=camvid/resnext_small data.root={{camvid}} sampler=class_uniform "
    "trainer.precision=float32",  # bfloat16, compared above, is slow on some processors
    "eval.py checkpoint={here}/camvid device=cpu data.split=test data.base_size=240",
    f"{TWO} {TRAIN}/two trainer.ema_decay=0.9 norm.sync=true data.root={{here}}/streets",
    f"{TWO} eval.py checkpoint={{here}}/two device=cpu predictions={{here}}/predicted tta.scales=[0.7,1] tta.flip=true",
    f"{TRAIN}/tuned init.weights={{here}}/two/checkpoints/last.pt norm=std",
    "-m scripts.predict checkpoint={here}/two input={here}/streets/leftImg8bit/val output={here}/alone device=cpu",
)
IGNORED = re.compile(r"environment|images_per_second|peak_memory_mib|_wait_s|mfu|/log|/tensorboard/|/\.lock")


@dataclass
class CheckoutComparison:
    old: str = MISSING  # a checkout of this project
    new: str = MISSING  # another checkout
    camvid: str = MISSING  # folder of the dataset
    out: str = MISSING  # Markdown file


def results(checkout: str, camvid: str) -> dict[str, str]:
    """{name: text} of all values that the commands write. CalledProcessError: a command fails."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as here:
        for line in COMMANDS:
            command = [sys.executable, *line.format(here=here, camvid=Path(camvid).resolve()).split()]
            subprocess.run(command, cwd=checkout, stdout=subprocess.DEVNULL, check=True)
        for file in sorted(filter(Path.is_file, Path(here).rglob("*"))):
            found.update(leaves(read(file), str(file.relative_to(here))))
    return {name: text.replace(here, "DIR") for name, text in found.items() if not IGNORED.search(name)}


def read(file: Path) -> object:
    if file.suffix == ".pt":
        return torch.load(file, map_location="cpu", weights_only=True)
    if file.suffix in (".json", ".jsonl") and file.name != "classes.json":
        return list(map(json.loads, file.read_text().splitlines()))
    if file.suffix == ".png":  # its pixels: how they are compressed is no result
        image = Image.open(file)
        return hashlib.sha256(repr((image.mode, image.size, image.getpalette())).encode() + image.tobytes()).hexdigest()
    return file.read_text().splitlines() if file.suffix == ".yaml" else hashlib.sha256(file.read_bytes()).hexdigest()


def leaves(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Yields (dotted name, text) of every leaf of nested containers. Equal texts mean equal bits."""
    if isinstance(value, (dict, list, tuple)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry, f"{name}.{key}")
    elif isinstance(value, torch.Tensor):
        content = hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        yield name, f"{value.dtype} {list(value.shape)} {content}"
    else:
        yield name, repr(value)


@configured("compare_checkouts", CheckoutComparison)
def main(values: DictConfig) -> None:
    config = configuration.typed(values, CheckoutComparison)
    old, new = (results(checkout, config.camvid) for checkout in (config.old, config.new))
    names = {**old, **new}
    lines = [f"- {name}: {old.get(name)} → {new.get(name)}" for name in names if old.get(name) != new.get(name)]
    summary = f"{config.old} and {config.new}: {len(lines)} of {len(names)} values differ."
    write_file(Path(config.out), "\n".join([summary, *lines]) + "\n")
    print(summary)
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
