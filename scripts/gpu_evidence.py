"""List the commands that measure on a CUDA device what the documents claim about it, with the minutes of each:

    python -m scripts.gpu_evidence out=OUT "roots={camvid: DIR}" "weights={table3_trained: FILE}"
    python -m scripts.gpu_evidence out=OUT rehearse=true            # tiny ones on a CPU, to check that each runs
    python -m scripts.gpu_evidence out=OUT only=[networks]

Pipe the list into bash to run it. Each command is stopped after its minutes. A benchmark goes on with the items that
are missing if the same command runs again. To add its calls to the page, copy its record from docs/results to OUT
before, and back afterwards.

`only=[train_seg]` compares standard norms with larger crops at equal time. The summaries of its runs say how many
images a second each trains; `equal_steps=N` adds standard norms for N = 300 * standard's / recomputed's images.
"""

import shlex
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig

from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.schema.keys import key, override

STEPS = "device=cuda crop_size=512 parts=[card] starts=1 rounds=20 warm_up=4"
CAPTURED = "device=cuda parts=[capture] starts=1 rounds=20 warm_up=4"
NETWORKS = "device=cuda images=128 rounds=10 captured=true compiler=null shares=[.3,.4,.5,.6,.8]"
ARM = "trainer.capture=true trainer.log_every_steps=10 experiment=camvid_table3_trained"
EQUAL_TIME, SEEDS = "std_equal_time", range(3)
COMMANDS = (  # program, arguments, minutes on one H100 with 16 cores; in the order in which they should run
    ("tests", "-m gpu -n auto", 4.0),
    ("train_seg", f"{ARM}/std seed=0", 1.0),
    *(("train_seg", f"{ARM}/recompute_larger_crops seed={seed}", 1.0) for seed in SEEDS),
    *(("train_seg", f"{ARM}/{EQUAL_TIME} seed={seed}", 1.5) for seed in SEEDS),
    ("networks", f"{NETWORKS} precisions=[bfloat16] only=[resnet50]", 3.0),
    ("networks", f"{NETWORKS} precisions=[float32] only=[resnet50]", 3.0),
    ("networks", f"{NETWORKS} precisions=[bfloat16] only=[vit_b_16,convnext_tiny]", 4.0),
    ("steps", f"{STEPS} recipe=table3/cityscapes_resnext101_inplace_fixed_crop crops=4", 4.0),
    ("steps", f"{STEPS} recipe=table3/cityscapes_wrn38_inplace_fixed_crop crops=5", 3.0),
    ("steps", f"{CAPTURED} crop_size=512 recipe=table3/cityscapes_resnext101_inplace_fixed_crop crops=4", 3.0),
    ("steps", f"{CAPTURED} crop_size=240 recipe=camvid/finetune_efficientnet_lite0 crops=8", 2.0),
    ("run_table", "table=camvid_table3_trained overrides=[trainer.capture=true]", 7.0),
    ("fit", "", 4.5),
    ("eval", "device=cuda data.split=train batch_size=1", 1.0),
    ("eval", "device=cuda data.split=train batch_size=auto", 1.0),
    ("eval", "device=cuda data.split=train tta.scales=[.7,1,1.2] tta.flip=true batch_size=1", 1.0),
    ("eval", "device=cuda data.split=train tta.scales=[.7,1,1.2] tta.flip=true batch_size=auto", 1.0),
    ("predict", "device=cuda", 1.0),
    ("layers", "device=cuda batch=32 captured=true dtypes=[float32,bfloat16] sample_ms=6", 4.0),
)
REHEARSED = {  # arguments instead
    "tests": "-m gpu --collect-only -q",
    "train_seg": "debug=smoke",
    "run_table": "table=camvid_table3_trained dry_run=true",
    "networks": "only=[squeezenet1_1] images=2 image_size=32 shares=[0.5] rounds=1 compiler=null",
    "steps": "recipe=null parts=[norms] crop_size=48 crops=2 starts=1 rounds=1 overrides=[norm.backend=eager]",
    "fit": "device=cpu tiny=true only=[cityscapes_resnext101]",
    "eval": "device=cpu",
    "predict": "device=cpu",
    "layers": "only=[CONV1] batch=2 rounds=1 sample_ms=0.01 compiler=null",
}


KEYS = {"roots": "data.root", "weights": "body.weights"}  # of train_seg.py


@dataclass
class GpuArguments:
    out: str = MISSING  # folder for the records
    only: list[str] = field(default_factory=list)  # programs; empty: all
    roots: Any = None  # as in run_table
    weights: Any = None
    equal_steps: int | None = key(None, above=0)  # of standard norms, in the time of larger crops
    images: str = "IMAGES"  # folder of images, for predict, which logs images / s like eval
    rehearse: bool = False  # on a CPU, with tiny tensors: nothing is measured

    def check(self) -> None:
        for name in self.only:
            if name not in REHEARSED:
                raise ValueError(f"only=[{name}]: expected some of {', '.join(REHEARSED)}")


def listed(arguments: GpuArguments) -> list[str]:
    """The commands, for a shell."""
    places = {name: value for name in ("roots", "weights") if (value := getattr(arguments, name))}
    lines, trained = [], override("checkpoint", f"{arguments.out}/runs/equal_time/std_seed0")
    for program, given, minutes in COMMANDS:
        if arguments.only and program not in arguments.only or EQUAL_TIME in given and not arguments.equal_steps:
            continue
        words = (REHEARSED[program] if arguments.rehearse else given).split()
        if program == "tests":
            words = ["python", "-m", "pytest", *words, f"--junitxml={arguments.out}/tests.xml"]
        elif program == "train_seg":
            name = given.split("/")[1].replace(" seed=", "_seed")
            words = ["python", "train_seg.py", *words, override("run_dir", f"{arguments.out}/runs/equal_time/{name}")]
            words += [f"trainer.steps={arguments.equal_steps}"] if EQUAL_TIME in given else []
            if not arguments.rehearse:  # on synthetic images
                words += [override(KEYS[place], path) for place, each in places.items() for path in each.values()]
        elif program == "run_table":
            own = [
                f"{name}={{{', '.join(f'{key}: {path}' for key, path in each.items())}}}"
                for name, each in places.items()
            ]
            words = ["python", "-m", "scripts.run_table", *words, *own, f"runs={arguments.out}/runs"]
        elif program == "eval":
            words = ["python", "eval.py", *words, trained, f"results={arguments.out}/evaluated.json"]
        elif program == "predict":
            images = override("input", arguments.images)
            words = ["python", "-m", "scripts.predict", *words, trained, images, f"output={arguments.out}/predicted"]
        else:
            words = ["python", "-m", f"scripts.evidence.{program}", *words, f"out={arguments.out}/{program}.json"]
        lines.append(f"timeout {minutes:g}m {shlex.join(words)}")
    return list(dict.fromkeys(lines))


def run(values: DictConfig) -> list[str]:
    lines = listed(configuration.typed(values, GpuArguments))
    print("\n".join(lines))
    return lines


main = configured("gpu_evidence", GpuArguments)(run)

if __name__ == "__main__":
    main()
