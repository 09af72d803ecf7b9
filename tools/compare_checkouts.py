"""Run the same short commands in two checkouts of this project, and name every result that differs by a bit:

    python -m tools.compare_checkouts old=DIR new=DIR camvid=DIR out=FILE.md
    python -m tools.compare_checkouts old=DIR new=. camvid=DIR out=FILE.md
    python -m tools.compare_checkouts old=. new=DIR camvid=DIR out=FILE.md

What is `IGNORED`, such as times, is no result. Exit status 1: some results differ.
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
from omegaconf import MISSING
from PIL import Image

from engine.configuration.command_line import configured
from engine.process.console import make_console
from engine.process.output_files import write_file
from engine.schema.keys import key

TRAIN = (
    "train_seg.py data.crop_size=64 data.crops_per_minibatch=4 data.workers=0 trainer.steps=6 trainer.device=cpu "
    "trainer.evaluate_every_steps=3 trainer.log_every_steps=1 trainer.deterministic=true run_dir=HERE"
)
TWO = "-m torch.distributed.run --standalone --nproc-per-node 2"
COMMANDS = (  # in float32 where the processor may be slow in bfloat16
    f"{TRAIN}/inplace norm=inplace_1 optim.max_gradient_norm=1",
    f"{TRAIN}/std norm=std data.workers=1",
    f"{TRAIN}/bfloat16 trainer.precision=bfloat16 norm.backend=compiled",
    f"{TRAIN}/float16 trainer.precision=float16",
    f"{TRAIN}/parts trainer.accumulation_steps=2 norm=checkpoint data.colour_jitter.hue=0.1 loss=cross_entropy",
    f"{TRAIN}/camvid experiment=camvid/resnext_small data.root=CAMVID sampler=class_uniform trainer.precision=float32",
    "eval.py checkpoint=HERE/camvid device=cpu data.split=test data.base_size=240",
    f"{TWO} {TRAIN}/two trainer.ema_decay=0.9 norm.sync=true data.root=HERE/streets",
    f"{TWO} eval.py checkpoint=HERE/two device=cpu predictions=HERE/predicted tta.scales=[0.7,1] tta.flip=true",
    f"{TRAIN}/tuned init.weights=HERE/two/checkpoints/last.pt norm=std",
    "-m scripts.predict checkpoint=HERE/two input=HERE/streets/leftImg8bit/val output=HERE/alone device=cpu",
)
IGNORED = re.compile(r"environment|images_per_second|peak_memory_mib|_wait_s|mfu|/log|/tensorboard/|/\.lock")


def results(checkout: str, camvid: str) -> dict[str, str]:
    """{name: text} of all values that the commands write. CalledProcessError: a command fails."""
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            words = command.replace("HERE", folder).replace("CAMVID", camvid).split()
            subprocess.run([sys.executable, *words], cwd=checkout, stdout=subprocess.DEVNULL, check=True)
        files = sorted(filter(Path.is_file, Path(folder).rglob("*")))
        values = {name: text for file in files for name, text in leaves(read(file), str(file.relative_to(folder)))}
    return {name: text.replace(folder, "DIR") for name, text in values.items() if not IGNORED.search(name)}


def read(file: Path) -> object:
    if file.suffix == ".pt":
        return torch.load(file, map_location="cpu", weights_only=True)
    if file.suffix == ".json":
        return json.loads(file.read_text())
    if file.suffix in (".jsonl", ".yaml"):
        return [line if file.suffix == ".yaml" else json.loads(line) for line in file.read_text().splitlines()]
    if file.suffix == ".png":  # its pixels: how they are compressed is no result
        image = Image.open(file)
        return hashlib.sha256(repr((image.mode, image.size, image.getpalette())).encode() + image.tobytes()).hexdigest()
    return hashlib.sha256(file.read_bytes()).hexdigest()


def leaves(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Yields (dotted name, text) of every leaf of nested containers. Equal texts mean equal bits."""
    if isinstance(value, (dict, list, tuple)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, f"{name}.{key}")
    elif isinstance(value, torch.Tensor):
        content = hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        yield name, f"{value.dtype} {list(value.shape)} {content}"
    else:
        yield name, repr(value)


@dataclass
class Checkouts:
    old: str = MISSING  # folder of a checkout
    new: str = MISSING  # folder of another
    camvid: str = MISSING  # folder of that dataset
    out: str = key(MISSING, written=True)  # path of the page


def compare(options: Checkouts) -> None:
    """Write the page. SystemExit: some results differ."""
    old, new = (results(checkout, str(Path(options.camvid).resolve())) for checkout in (options.old, options.new))
    lines = [f"- {name}: {old.get(name)} → {new.get(name)}" for name in old | new if old.get(name) != new.get(name)]
    summary = f"{options.old} and {options.new}: {len(lines)} of {len(old | new)} values differ."
    make_console().print(summary, soft_wrap=True)
    write_file(Path(options.out), "\n".join([summary, *lines]) + "\n")
    if lines:
        sys.exit(1)


main = configured("compare_checkouts", Checkouts)(compare)

if __name__ == "__main__":
    main()
