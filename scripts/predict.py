"""Predict images with a checkpoint alone: `python -m scripts.predict checkpoint=FILE input=IMAGE_OR_DIR output=DIR`.

Writes three PNGs of the size of each image: ids/NAME.png (train ids, the numbers of classes.json), colour/NAME.png
and overlays/NAME.png. window.size=PIXELS bounds the memory for large images, as in eval.py. A path with blanks or
letters beyond ASCII needs quotes that reach Hydra: 'input="Straße 1"'.
"""

import json
from collections import Counter
from functools import partial
from pathlib import Path

import hydra
import numpy as np
import torch
from omegaconf import DictConfig

from datasets.reading import decode_image
from engine import build, checkpoint, inference, reporting
from engine import config as configuration
from engine.distributed import device_of
from engine.pictures import inside, overlay, writable_folder, write_png
from engine.schema import SegmentationRun

configuration.register()

KINDS = ("ids", "colour", "overlays")
SUFFIXES = (".png", ".jpg", ".jpeg")


def predict(values: DictConfig) -> list[Path]:
    """Predict as configured, `engine.schema.Prediction`. Returns the files of train ids, one for each image.

    Raises:
        ValueError: the checkpoint or the input cannot be used; or, after all others were predicted, some images are
            unreadable, whose files it names.
    """
    options = configuration.typed(values)
    console = reporting.make_console()
    reporting.log_to(console, None)
    output = Path(options.output).expanduser()
    images = find_images(Path(options.input).expanduser(), output)
    path = Path(options.checkpoint)
    state = checkpoint.load(path)
    config = configuration.from_plain(state["config"], f"checkpoint {path}")
    configuration.override(config, options)
    device = device_of(options.device)
    make = partial(build.network_on, config, len(state["classes"]), device)
    build.arithmetic(config.trainer)
    network = checkpoint.load_network(make, state, state["classes"], path, options.averaged)
    palette = np.array(state["palette"] if "palette" in state else palette_of_data(config, path), np.uint8)  # (K, 3)
    how = dict(
        image_input=build.image_input(config, device),
        autocast=build.autocast(config.trainer.precision, device),
        views=build.views(options),
    )

    writable_folder("output", output)
    write_classes(output / "classes.json", state["classes"], palette)
    written, unreadable = [], []
    with reporting.progress_bar(console) as progress:
        for name, file in reporting.tracked(progress, images.items(), "predicting"):
            try:
                ids_file, colour_file, overlay_file = (inside(output / kind, f"{name}.png") for kind in KINDS)
                image = decode_image(file)  # (H, W, 3)
            except ValueError as error:
                unreadable.append(str(error))
                continue
            batch = torch.from_numpy(image).permute(2, 0, 1)[None]  # (1, 3, H, W)
            ids = inference.predict(network, batch, **how)[0].cpu().numpy()
            write_png(ids_file, ids)
            write_png(colour_file, palette[ids])
            write_png(overlay_file, overlay(image, palette[ids]))
            written.append(ids_file)
    console.print(f"predicted {len(written)} of {len(images)} images: {output}", soft_wrap=True)
    if unreadable:
        raise ValueError("\n".join([f"{len(unreadable)} of {len(images)} images were not predicted:", *unreadable]))
    return written


def find_images(source: Path, output: Path) -> dict[str, Path]:
    """{name of the results, without suffix: image file}, sorted: an image, or all of a folder and the folders in it.

    A name is the path in the folder without the suffix; where two images differ in nothing else, all keep theirs.
    Hidden files and what an earlier prediction wrote to `output` are left out. ValueError where there is no image.
    """
    if source.is_file():
        return {source.stem: source}
    if not source.is_dir():
        raise ValueError(f"input={source} does not exist: expected a PNG or JPEG file, or a folder of such files")
    ours = {(output / kind).resolve() for kind in KINDS}
    files = sorted(
        path
        for path in source.rglob("*")
        if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
        if not ours & set(path.resolve().parents)
    )
    if not files:
        raise ValueError(f"input={source} holds no {', '.join(SUFFIXES)} files, or only those that were predicted")
    names = [path.relative_to(source).with_suffix("").as_posix() for path in files]
    if max(Counter(name.casefold() for name in names).values()) > 1:
        names = [path.relative_to(source).as_posix() for path in files]
    return dict(zip(names, files, strict=True))


def palette_of_data(config: SegmentationRun, path: Path) -> tuple[tuple[int, int, int], ...]:
    """For checkpoints from before they carried it. ValueError where the data of the training is no longer there."""
    try:
        return build.dataset(config.data, config.data.val_split).palette
    except ValueError as error:
        raise ValueError(f"checkpoint {path} carries no colours, and the data has none: {error}") from error


def write_classes(path: Path, classes: list[str], palette: np.ndarray) -> None:
    """What the ids and colours mean: [{"id": 0, "name": "road", "colour": [128, 64, 128]}, …]."""
    entries = [
        {"id": number, "name": name, "colour": colour}
        for number, (name, colour) in enumerate(zip(classes, palette.tolist(), strict=True))
    ]
    path.write_text("[\n" + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries) + "\n]\n", "utf-8")


@hydra.main(version_base="1.3", config_path="../configs", config_name="predict")
def main(values: DictConfig) -> None:
    with reporting.errors_for_users():
        predict(values)


if __name__ == "__main__":
    main()
