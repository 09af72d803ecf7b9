"""Predict images from a checkpoint alone:

    python -m scripts.predict checkpoint=RUN_DIR input=IMAGE_OR_DIR output=DIR
    python -m scripts.predict checkpoint=FILE.pt input=DIR output=DIR window.size=1024
    python -m scripts.predict checkpoint=FILE.pt 'input="Straße 1"' output=DIR precision=bfloat16

Reads the usual formats of photographs, and turns them as their EXIF orientation says. Writes three PNGs per image,
at its size: ids/NAME.png (train ids, as in classes.json), colour/NAME.png and overlays/NAME.png. window.size=PIXELS
bounds the memory for large images, as in eval.py. A path with blanks or non-ASCII letters needs quotes that reach
Hydra: 'input="Straße 1"'.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig
from PIL import Image
from rich.console import Console

from datasets import reading_errors
from datasets.layout import first_of
from datasets.reading import PHOTOGRAPHS, decode_photograph
from datasets.time_limit import limited
from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.console import counting, log_to, logger, make_console, progress_bar, tracked
from engine.distributed import device_of
from engine.output_files import inside, writable_folder, write_file, write_png
from engine.schema.evaluation import Prediction
from engine.schema.segmentation import SegmentationRun
from engine.segmentation import inference
from engine.segmentation.pictures import overlay

KINDS, CLASSES = ("ids", "colour", "overlays"), "classes.json"


def predict(values: DictConfig) -> list[Path]:
    """Predict as configured (`engine.schema.evaluation.Prediction`). Returns each image's file of train ids.

    Raises:
        ValueError: the checkpoint or the input cannot be used; or some images are unreadable. In that case it names
            them after predicting the others.
    """
    options = configuration.typed(values, Prediction)
    console = make_console()
    log_to(console, None)
    path = checkpoint.file_of(options.checkpoint)
    options.checkpoint = str(path)
    state = checkpoint.load(path)
    config = configuration.of_checkpoint(state, SegmentationRun, f"checkpoint {path}")
    options.apply_to(config)
    with reading_errors(config.data.timeout_seconds):
        return predict_images(options, config, state, console)


def predict_images(options: Prediction, config: SegmentationRun, state: dict, console: Console) -> list[Path]:
    """`predict` with the network of `state`, the content of the checkpoint; `options` are applied to `config`."""
    path, output = Path(options.checkpoint), Path(options.output)
    images = find_images(Path(options.input), output)
    assemble.arithmetic(config.trainer)
    device, views = device_of(options.device), assemble.views(options, config.data)
    make, averaged = assemble.segmentation_network, options.averaged
    forward = assemble.trained_forward(config, make, state, path, state["classes"], averaged, device)
    palette = np.array(state["palette"], np.uint8)  # (K, 3)

    writable_folder("output", output)
    write_classes(output / CLASSES, state["classes"], palette)
    written, unreadable = [], []
    with progress_bar(console) as progress, counting(progress, "windows") as windows:
        for name, file in tracked(progress, images.items(), "predicting"):
            try:
                ids_file, colour_file, overlay_file = (inside(output / kind, f"{name}.png") for kind in KINDS)
                with limited(file):
                    image = decode_photograph(file)  # (H, W, 3)
            except ValueError as error:
                unreadable.append(str(error))
                continue
            batch = torch.from_numpy(image).permute(2, 0, 1)[None]  # (1, 3, H, W)
            ids = inference.predict(forward, batch, views, config.evaluation_memory_advice, windows)[0].cpu().numpy()
            write_png(ids_file, ids)
            write_png(colour_file, palette[ids])
            write_png(overlay_file, overlay(image, palette[ids]))
            written.append(ids_file)
    console.print(f"predicted {len(written)} of {len(images)} images: {output}", soft_wrap=True)
    if unreadable:
        raise ValueError("\n".join([f"{len(unreadable)} of {len(images)} images were not predicted:", *unreadable]))
    return written


@limited()
def find_images(source: Path, output: Path) -> dict[str, Path]:
    """Find one image, or all in a folder and its subfolders: {result name: image file}, sorted.

    A name is the path in the folder without the suffix; images that differ only in the suffix keep theirs. Files whose
    suffix is no image format's are skipped, which is logged. Hidden files and earlier predictions in `output` are left
    out. Raises ValueError if there is no image.
    """
    if source.is_file():
        return {source.stem: source}
    if not source.is_dir():
        raise ValueError(f"input={source} does not exist: expected an image file, or a folder of such files")
    ours = {(output / kind).resolve() for kind in (*KINDS, CLASSES)}
    files = sorted(
        path
        for path in source.rglob("*")
        if path.is_file() and not path.name.startswith(".")
        if ours.isdisjoint([path.resolve(), *path.resolve().parents])
    )
    suffixes = {suffix for suffix, name in Image.registered_extensions().items() if name in PHOTOGRAPHS}
    suffixes.add(".mpo")  # of JPEGs, in which Pillow does not register it
    images = [path for path in files if path.suffix.lower() in suffixes]
    skipped = [str(path.relative_to(source)) for path in files if path.suffix.lower() not in suffixes]
    if skipped:
        logger.info(f"skipped {len(skipped)} file(s) without an image's suffix: {first_of(skipped)}")
    if not images:
        raise ValueError(f"input={source} holds no image, such as .png, .jpg or .tif, or only predictions")
    return dict(zip(result_names([path.relative_to(source) for path in images]), images, strict=True))


def result_names(images: Sequence[Path]) -> list[str]:
    """The paths without suffixes; with suffixes where two would be equal, also on disks that ignore case."""
    names = [path.with_suffix("").as_posix() for path in images]
    while True:  # a suffix may make a name equal to another one
        counts = Counter(name.casefold() for name in names)
        full = [
            path.as_posix() if counts[name.casefold()] > 1 else name for name, path in zip(names, images, strict=True)
        ]
        if full == names:
            return names
        names = full


def write_classes(path: Path, classes: list[str], palette: np.ndarray) -> None:
    """Write the meaning of ids and colours: [{"id": 0, "name": "road", "colour": [128, 64, 128]}, …]."""
    entries = [
        {"id": number, "name": name, "colour": colour}
        for number, (name, colour) in enumerate(zip(classes, palette.tolist(), strict=True))
    ]
    write_file(path, "[\n" + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries) + "\n]\n")


@configured("predict", Prediction)
def main(values: DictConfig) -> None:
    predict(values)


if __name__ == "__main__":
    main()
