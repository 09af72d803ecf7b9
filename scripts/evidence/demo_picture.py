"""Draw the README's picture of `make demo`: three scenes, their labels and predictions, with a legend:

    python -m scripts.evidence.demo_picture
    python -m scripts.evidence.demo_picture run_dir=RUN_DIR out=FILE.png
    python -m scripts.evidence.demo_picture images=[0,1,2,3]

Takes the pictures that eval.py wrote into RUN_DIR/overlays, and the run's scores of the classes.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from omegaconf import DictConfig
from PIL import Image

from datasets import synthetic
from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.output_files import write_figure
from engine.segmentation.pictures import class_patch
from scripts.reports import charts


@dataclass
class DemoPicture:
    run_dir: str = "runs/demo"  # of `make demo`
    images: list[int] = field(default_factory=lambda: [0, 1, 3])  # positions in the validation split
    out: str = "docs/demo.png"  # the picture


def draw(values: DictConfig) -> Path:
    """Write the picture and return its path. ValueError: the run has no such overlays."""
    arguments = configuration.typed(values, DemoPicture)
    run, out = Path(arguments.run_dir), Path(arguments.out)
    dataset = synthetic(None, "val")
    files = [run / "overlays" / f"{dataset.files[number].name}.png" for number in arguments.images]
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(f"run_dir={run}: {missing[0]} does not exist: evaluate with overlays={run / 'overlays'}")
    iou = json.loads((run / "results.json").read_text())["iou"]
    pictures = [np.asarray(Image.open(file)) for file in files]
    write_figure(out, figure(pictures, {name: share for name, share in iou.items() if share is not None}), dpi=110)
    return out


def figure(pictures: list[np.ndarray], iou: dict[str, float]) -> Figure:
    """Comparisons, uint8 (H, 3 W, 3) RGB, below each other, and a legend of the classes with their IoU."""
    dataset = synthetic(None, "val")
    height, width = pictures[0].shape[:2]
    drawn, (axes,) = charts.panels(1, 1, (7.5, 7.5 * len(pictures) * height / width + 0.8))
    axes.imshow(np.concatenate(pictures))
    for edge, title in enumerate(("image", "ground truth", "prediction")):
        axes.text((edge + 0.5) * width / 3, -6, title, ha="center", fontsize=9)
    axes.set_axis_off()
    colours = dict(zip(dataset.classes, dataset.palette, strict=True))
    handles = [class_patch(colours[name], f"{name} {share:.0%}") for name, share in iou.items()]
    options = dict(ncols=4, fontsize=8, frameon=False, title="class and its IoU on 40 scenes", title_fontsize=8)
    drawn.legend(handles=handles, loc="outside lower center", **options)
    return drawn


@configured("demo_picture", DemoPicture)
def main(values: DictConfig) -> None:
    print(draw(values))


if __name__ == "__main__":
    main()
