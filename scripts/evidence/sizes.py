"""Evaluate networks on images whose sides are no multiples of their output stride, padded in several ways:

    python -m scripts.evidence.sizes camvid=DIR runs=FOLDER out=FILE.json
    python -m scripts.evidence.sizes camvid=DIR runs=FOLDER every=10 out=FILE.json
    python -m scripts.evidence.sizes camvid=DIR runs=FOLDER only=[EfficientNet-Lite0] out=FILE.json

FOLDER holds two run directories of trainings on CamVid: lite0 and tiny.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from omegaconf import MISSING
from torch import Tensor

from datasets import WholeImages
from datasets.camvid import camvid
from engine.prediction import open_network
from engine.schema.keys import key
from engine.segmentation.scores import Counts, all_scores
from models.segmentation import STRETCHED, SegmentationNetwork, upsampled
from scripts.reports import frame
from scripts.reports.markdown import Rows

NETWORKS = {"EfficientNet-Lite0": "lite0", "ResNeXt": "tiny"}
SIZES = ((360, 480), (356, 476), (353, 473))  # 8k, 8k - 4, 8k - 7
WAYS = ("repeated pixels", "zeros", "not padded, cut", "stretched")


@dataclass
class SizesArguments(frame.Arguments):
    camvid: str = MISSING  # folder of the images
    runs: str = MISSING  # folder of the run directories
    every: int = key(3, above=0)  # image of the validation set


def items(arguments: SizesArguments) -> dict[str, tuple[str]]:
    return {network: (network,) for network in NETWORKS}


def measure(arguments: SizesArguments, network: str) -> Rows:
    """mIoU of every way on images cut to every size, from their top left corner."""
    forward = open_network(f"{arguments.runs}/{NETWORKS[network]}").passes
    trained = forward.network
    assert isinstance(trained, SegmentationNetwork)
    images = WholeImages(camvid(arguments.camvid, "val"))
    counts = {(size, way): Counts(images.dataset.table) for size in SIZES for way in WAYS}
    for index in range(0, len(images), arguments.every):
        item = images[index]
        for height, width in SIZES:
            minibatch = {name: item[name][None, ..., :height, :width] for name in ("image", "label")}
            pixels = forward.normalised(minibatch["image"])
            for way in WAYS:
                with torch.inference_mode(), forward.autocast():
                    scores = logits(trained, pixels, way)
                counts[(height, width), way].add(scores.argmax(dim=1).to(torch.uint8), minibatch)
    return [
        {
            **{"network": network, "height": height, "width": width, "way": way},
            "miou": all_scores(own, images.dataset.table, images.dataset.has_instances)["miou"],
        }
        for ((height, width), way), own in counts.items()
    ]


def logits(network: SegmentationNetwork, pixels: Tensor, way: str) -> Tensor:
    """Logits (N, K, H, W) of normalised images (N, 3, H, W)."""
    size, stride = pixels.shape[2:], network.stride
    if way == "zeros":
        padded = F.pad(pixels, (0, -size[1] % stride, 0, -size[0] % stride))
        return network(padded)[..., : size[0], : size[1]]
    if way == "not padded, cut":
        return upsampled(network.cls(network.head(network.body(pixels))).float(), size, stride)
    return network(pixels, upsampling=STRETCHED) if way == "stretched" else network(pixels)


def about(arguments: dict) -> tuple[str, str]:
    return "Images of any size", f"every {arguments['every']}th validation image"


BENCHMARK = frame.Benchmark("sizes", SizesArguments, items, measure, about)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
