"""List the commands that measure on a CUDA device what the documents claim about it, with the minutes of each:

    python -m benchmarks.gpu_evidence out=OUT "roots={camvid: DIR}" "weights={table3_trained: FILE}"
    python -m benchmarks.gpu_evidence out=OUT rehearse=true            # tiny ones on a CPU, to check that each runs
    python -m benchmarks.gpu_evidence out=OUT only=[networks]

Pipe the list into bash. Each command is stopped after its minutes; the same command goes on with a benchmark's missing
items. To add its calls to the page, copy its record from docs/results to OUT before, and back afterwards.
"""

import re
import shlex
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from engine.configuration.command_line import configured
from engine.schema.keys import key, quoted

STEPS = "device=cuda starts=1 rounds=20 warm_up=4 crop_size=512"
NETWORKS = "device=cuda images=128 rounds=10 captured=true shares=[.3,.4,.5,.6,.8]"
ARM = "python train_seg.py data.root=CAMVID body.weights=WEIGHTS trainer.capture=true trainer.log_every_steps=10 "
ARM += "experiment=camvid_table3_trained/{0} seed={1} run_dir=OUT/runs/equal_time/{0}_seed{1}"
TABLE = "python -m scripts.run_table table=camvid_table3_trained runs=OUT/runs overrides=[trainer.capture=true]"
TRAINED = "checkpoint=OUT/runs/equal_time/std_seed0 device=cuda"
EVAL = f"python eval.py {TRAINED} data.split=train results=OUT/evaluated_NUMBER.json"
COMMANDS = (  # program, minutes on one H100 with 16 cores, arguments or the whole command; in the order to run them
    ("tests", 4.0, "python -m pytest -m gpu -n auto --junitxml=OUT/tests.xml"),
    # The default path on the installed torch, which no record has.
    ("train_seg", 1.0, ARM.format("std", 0).replace("=true", "=auto").replace("equal_time", "capture_auto")),
    ("train_seg", 1.0, ARM.format("std", 0).replace("=true", "=false").replace("equal_time", "capture_false")),
    ("train_seg", 1.0, ARM.format("std", 0)),
    *(("train_seg", 1.0, ARM.format("recompute_larger_crops", seed)) for seed in range(3)),
    *(("train_seg", 1.5, ARM.format("std_equal_time", seed) + " trainer.steps=N_STEPS") for seed in range(3)),
    ("networks", 3.0, f"{NETWORKS} precisions=[bfloat16] only=[resnet50]"),
    ("networks", 3.0, f"{NETWORKS} precisions=[float32] only=[resnet50]"),
    ("networks", 4.0, f"{NETWORKS} precisions=[bfloat16] only=[vit_b_16,convnext_tiny]"),
    ("networks", 4.0, f"{NETWORKS} precisions=[bfloat16] gradients=freed only=[resnet50,vit_b_16]"),
    ("steps", 4.0, f"{STEPS} parts=[card] recipe=table3/cityscapes_resnext101_inplace_fixed_crop crops=4"),
    ("steps", 3.0, f"{STEPS} parts=[card] recipe=table3/cityscapes_wrn38_inplace_fixed_crop crops=5"),
    ("steps", 3.0, f"{STEPS} parts=[capture] recipe=table3/cityscapes_resnext101_inplace_fixed_crop crops=4"),
    ("steps", 2.0, f"{STEPS} crop_size=240 parts=[capture] recipe=camvid/finetune_efficientnet_lite0 crops=8"),
    ("run_table", 7.0, f"{TABLE} roots={{camvid:CAMVID}} weights={{table3_trained:WEIGHTS}}"),
    ("fit", 4.5, ""),
    *(("eval", 1.0, f"{EVAL} batch_size={size}") for size in (1, "auto")),
    *(("eval", 1.0, f"{EVAL} batch_size={size} tta.scales=[.7,1,1.2] tta.flip=true") for size in (1, "auto")),
    ("predict", 1.0, f"python -m scripts.predict {TRAINED} input=IMAGES output=OUT/predicted"),
    ("layers", 4.0, "device=cuda batch=32 captured=true dtypes=[float32,bfloat16] sample_ms=6"),
)
PROGRAMS = tuple(dict.fromkeys(program for program, *_ in COMMANDS))
REHEARSED = {  # arguments to add
    "tests": "--collect-only -q",
    "train_seg": "debug=smoke data=synthetic trainer.device=cpu trainer.capture=auto",
    "run_table": "dry_run=true",
    "networks": "device=cpu captured=false only=[squeezenet1_1] images=2 image_size=32 shares=[.5] rounds=1",
    "steps": "device=cpu recipe=null parts=[norms] crop_size=48 crops=2 rounds=1 overrides=[norm.backend=eager]",
    "fit": "device=cpu tiny=true only=[cityscapes_resnext101]",
    "eval": "device=cpu data.split=val data.base_size=64",
    "layers": "device=cpu captured=false only=[CONV1] batch=2 rounds=1 sample_ms=0.01 compiler=null",
}


@dataclass
class GpuArguments:
    out: str = MISSING  # folder for the records
    only: list[str] = key([*PROGRAMS], one_of=PROGRAMS)
    roots: Any = None  # as in run_table
    weights: Any = None
    equal_steps: int | None = key(None, above=0)  # adds standard norms: 300 * theirs / larger crops' images a second
    images: str = "IMAGES"  # folder of images, for predict, which logs images / s like eval
    rehearse: bool = False  # on a CPU, with tiny tensors: nothing is measured


def commands(arguments: GpuArguments) -> list[str]:
    """The commands, for a shell."""
    roots = {} if arguments.rehearse else arguments.roots or {}
    weights = {} if arguments.rehearse else arguments.weights or {}
    paths = {"CAMVID": roots.get("camvid"), "WEIGHTS": weights.get("table3_trained"), "IMAGES": arguments.images}
    places = {"OUT": arguments.out, "N_STEPS": str(arguments.equal_steps)}
    places |= {place: quoted(path) for place, path in paths.items() if path}
    lines = []
    for number, (program, minutes, argument) in enumerate(COMMANDS):
        if program not in arguments.only or ("N_STEPS" in argument and not arguments.equal_steps):
            continue
        places["NUMBER"] = str(number)
        start = "" if argument.startswith("python") else f"python -m benchmarks.{program} out=OUT/{program}.json "
        words = (start + argument).split()
        if arguments.rehearse:
            words += REHEARSED.get(program, "device=cpu").split()
        words = [word for word in words if not any(place in word for place in paths.keys() - places)]
        words = [re.sub("|".join(places), lambda match: places[match[0]], word) for word in words]
        lines.append(f"timeout {minutes:g}m {shlex.join(words)}")
    return lines


@configured("gpu_evidence", GpuArguments)
def main(arguments: GpuArguments) -> None:
    print("\n".join(commands(arguments)))


if __name__ == "__main__":
    main()
