"""Train CamVid with standard and in-place norms, at the same batch and at equal memory:

    python -m scripts.evidence.equal_memory device=cuda camvid=DIR out=FILE.json
    python -m scripts.evidence.equal_memory device=cuda camvid=DIR only=[standard] out=FILE.json
    python -m scripts.evidence.equal_memory steps=2 seeds=[0] out=FILE.json

Without camvid, it trains on drawn scenes. `steps` takes a few steps on tiny crops, which learn nothing.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import train_seg
from engine.configuration.command_line import composed
from engine.schema.keys import key
from scripts.reports import frame
from scripts.reports.markdown import Rows
from scripts.reports.runs import Run

TRAININGS = {  # the rows of configs/experiment/camvid_table3, for images of half their size
    "standard": ("norm=std", "data.crop_size=120"),
    "in-place-same batch": ("norm=inplace", "data.crop_size=120"),
    "in-place-larger crops at equal memory": ("norm=inplace", "data.crop_size=148"),
}
RECIPE = (
    *("experiment=camvid_table3/std", "data.base_size=240", "data.workers=12"),
    *("trainer.precision=bfloat16", "trainer.evaluate_every_epochs=30"),
)
TINY = (
    *("data.workers=0", "data.crops_per_minibatch=2", "norm.backend=eager"),
    *("trainer.evaluate_images=2", "trainer.log_every_steps=1"),
)


@dataclass
class EqualMemoryArguments(frame.DeviceArguments):
    camvid: str | None = None  # folder of the dataset
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    steps: int | None = key(None, above=0)  # of each training; null: the recipe's


def items(arguments: EqualMemoryArguments) -> dict[str, tuple]:
    return {f"{name}/{seed}": (name, seed) for seed in arguments.seeds for name in TRAININGS}


def measure(arguments: EqualMemoryArguments, name: str, seed: int) -> Rows:
    """A whole training: {"training", "seed", "miou", "images_per_second", "minutes", "peak_memory_mib"}."""
    if arguments.camvid is None and arguments.steps is None:
        raise ValueError("camvid=null: expected the folder of CamVid")
    with tempfile.TemporaryDirectory() as folder:
        own = (f"trainer.device={arguments.device}", f"run_dir={folder}/run", f"seed={seed}", *TRAININGS[name])
        data = () if arguments.camvid is None else (*RECIPE, f"data.root={arguments.camvid}")
        few = () if arguments.steps is None else (*TINY, f"trainer.steps={arguments.steps}")
        results = train_seg.train(composed("train_seg", *data, *own, *few))
        return [{"training": name, "seed": seed, "miou": results["miou"], **Run(Path(folder) / "run").training}]


def about(arguments: dict) -> tuple[str, str]:
    size = "CamVid at half its size (240x180), small ResNeXt and DeepLabV3 from scratch, 30 epochs of 8 crops, bfloat16"
    return "Trainings at the same batch and at equal memory", size


BENCHMARK = frame.Benchmark("equal_memory", EqualMemoryArguments, items, measure, about, apart=True)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
