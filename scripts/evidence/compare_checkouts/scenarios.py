"""The commands whose results are compared."""

import signal
from typing import NamedTuple


class Command(NamedTuple):
    """One command of a scenario. In its words, {here} is the scenario's folder and {camvid} the dataset's."""

    line: str
    processes: int = 1
    stop: signal.Signals | None = None  # sent once {here}/run/metrics.jsonl has a record of step `STOP_STEP`
    only_old: bool = False  # only the old checkout runs it; the new one starts from a copy of the resulting folder


STOP_STEP = 4
SHORT = (
    "data.crop_size=64 data.crops_per_minibatch=4 data.workers=0 trainer.steps=6 trainer.evaluate_every_steps=3 "
    "trainer.evaluate_images=3 trainer.log_every_steps=1 trainer.pictures=1 trainer.deterministic=true "
    "trainer.device=cpu"
)
AVERAGED = "trainer.ema_decay=0.9 trainer.ema_statistics_minibatches=2"
DROPOUT = (
    "body=wider_resnet38_a2 body.structure=[1,1,1,1,1,1] body.stem_channels=8 "
    "body.channels=[[8,8],[8,8],[16,16],[16,16],[8,16,32],[16,32,64]]"
)
# An epoch has four steps. The run stops in the second epoch, soon after step 4, then continues to the end of the third.
TO_STOP = (
    f"{SHORT} {DROPOUT} {AVERAGED} data.crop_size=32 data.crops_per_minibatch=41 trainer.steps=12 "
    "trainer.evaluate_every_steps=6 trainer.checkpoint_every_steps=2 resume=auto"
)


def train(
    keys: str, run: str = "run", processes: int = 1, stop: signal.Signals | None = None, only_old: bool = False
) -> Command:
    return Command(f"train_seg.py run_dir={{here}}/{run} {keys}", processes, stop, only_old)


def evaluate(keys: str, processes: int = 1) -> Command:
    return Command(f"eval.py checkpoint={{here}}/run/checkpoints/last.pt device=cpu workers=0 {keys}", processes)


SCENARIOS: dict[str, tuple[Command, ...]] = {
    "float32": (train(f"{SHORT} norm=inplace_1"),),
    "bfloat16_compiled_norms": (train(f"{SHORT} trainer.precision=bfloat16 norm.backend=compiled"),),
    "float16": (train(f"{SHORT} trainer.precision=float16 data.crop_size=32"),),
    "standard_norms_dropout_worker": (train(f"{SHORT} {DROPOUT} norm=std data.workers=1"),),
    "parts_class_uniform_clipped": (
        train(
            f"{SHORT} data.crops_per_minibatch=5 trainer.accumulation_steps=2 optim.max_gradient_norm=1 "
            "sampler=class_uniform sampler.fraction=0.5 sampler.folder={here}/index data.base_size=192 "
            "data.colour_jitter.hue=0.1 loss=cross_entropy norm=checkpoint"
        ),
    ),
    "camvid_bfloat16": (
        train(
            f"experiment=camvid/resnext_small data.root={{camvid}} {SHORT} data.crop_size=96 norm.backend=eager "
            "sampler=class_uniform sampler.folder={here}/index data.workers=1"
        ),
        evaluate("data.split=test data.base_size=240"),
    ),
    "two_processes": (
        train(f"{SHORT} {AVERAGED} norm.sync=true data.crops_per_minibatch=5", processes=2),
        evaluate("predictions={here}/predictions", processes=2),
    ),
    "fine_tuning": (
        train(f"{SHORT} {AVERAGED}"),
        train(f"{SHORT} init.weights={{here}}/run/checkpoints/last.pt", run="from_network"),
        train(f"{SHORT} init.weights={{here}}/run/checkpoints/last.pt init.part=body norm=std", run="from_body"),
    ),
    "evaluation_prediction": (
        train(f"{SHORT} {AVERAGED} data.root={{here}}/streets"),
        evaluate("predictions={here}/predictions overlays={here}/overlays overlay_images=10"),
        evaluate("window.size=96"),
        evaluate("tta.scales=[0.7,1] tta.flip=true"),
        evaluate("data.base_size=192"),
        evaluate("averaged=false workers=1"),
        Command(
            "-m scripts.predict checkpoint={here}/run/checkpoints/best.pt device=cpu "
            "input={here}/streets/leftImg8bit/val output={here}/predicted"
        ),
    ),
    "killed": (train(TO_STOP, stop=signal.SIGKILL), train(TO_STOP)),
    "stopped": (train(TO_STOP, stop=signal.SIGTERM), train(TO_STOP)),
    "two_processes_stopped": (train(TO_STOP, stop=signal.SIGTERM, processes=2), train(TO_STOP, processes=2)),
    "stopped_by_old": (train(TO_STOP, stop=signal.SIGTERM, only_old=True), train(TO_STOP)),
}
