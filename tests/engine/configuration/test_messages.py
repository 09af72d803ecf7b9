"""What commands with other programs' words, slips and units are answered."""

import re
import shlex
import sys

import pytest

import train_seg
from engine.configuration import messages
from engine.configuration.messages import Messages
from engine.schema.segmentation import SegmentationRun
from tests.engine.configuration.test_words import COMMANDS
from tests.runs import checked

# Command: what its message contains; "" for a right one.
ANSWERS = {
    # Several words are answered at once.
    "predict --ckpt x.pth --img a.png --out-dir o": "give checkpoint=x.pth input=a.png output=o",
    "train_imagenet /data/imagenet --model resnet50": "give data.root=/data/imagenet body=resnet50",
    "train_seg batch_size=4 num_workers=2 mixup=1": "no such keys as batch_size and num_workers; give "
    "data.crops_per_minibatch=4 data.workers=2; mixup: there is none",
    "train_seg norm=GN loss=dice": "norm=GN: there is none: expected a batch normalisation, norm=inplace or norm",
    "train_imagenet --model resnet50 -b 256 --sched cosine --input-size 3 224 224 -j 8": "give body=resnet50 "
    "data.crops_per_minibatch=256 lr_schedule=cosine data.crop_size=224 data.workers=8",
    # detectron2
    "train_seg --opts SOLVER.IMS_PER_BATCH 8 SOLVER.STEPS '(30000,)'": "give data.crops_per_minibatch=8 "
    "lr_schedule.steps=[30000], with lr_schedule=multistep; --opts: leave it out",
    "train_seg MODEL.RESNETS.DEPTH=101 MODEL.RESNETS.NORM=SyncBN": "give body=resnet101 norm=std norm.sync=true",
    "train_seg INPUT.CROP.SIZE=[512,1024] OUTPUT_DIR=./o": "give data.crop_size=512 data.crop_aspect=2 run_dir=./o",
    "train_seg --config-file configs/experiment/camvid/resnext_small.yaml": "give experiment=camvid/resnext_small",
    "train_seg --num-gpus 2": "start it as torchrun --nproc-per-node 2 train_seg.py",
    # mmengine
    "train_seg model.decode_head.type=UPerHead model.auxiliary_head.channels=4": "deeplabv3 is the only head",
    "train_seg param_scheduler.0.type=PolyLR 'param_scheduler[0].power=0.9'": "lr_schedule=poly lr_schedule.power=0.9",
    "train_seg optim_wrapper.optimizer.type=AdamW": "there is no such optim; give optim=adamw",
    # Lightning
    "train_seg --ckpt_path=a/checkpoints/epoch=1.ckpt": "give run_dir=a resume=auto",
    "train_seg trainer.val_check_interval=0.5": "give trainer.evaluate_every_steps=N",
    "train_seg trainer.device=mps": "expected auto, cpu or cuda",
    # Hugging Face
    "train_seg --per_device_train_batch_size 8 --num_train_epochs 3.0 --fp16": "give data.crops_per_minibatch=8 "
    "trainer.epochs=3 trainer.precision=float16",
    # Networks, losses and other choices
    "train_seg body=convnext_tiny": "give body=timm body.network=convnext_tiny norm=std",
    "train_seg model=foo": "body=torchvision body.network=NAME norm=std, or body=timm",
    "train_seg lr_schedule=cosin": "the nearest is cosine",
    # No advice across groups but for near spellings and fitting types
    "train_seg trainer.interval=10": "give trainer.log_every_steps, trainer.evaluate_every_steps or trainer.checkpoint",
    "train_seg foo.backend=gloo": "there is no such key; --help lists them all",
    # Slips and units
    "train_seg data.crop_size=512*1024": "give data.crop_size=512 data.crop_aspect=2",
    "train_seg 'optim.betas=(0.9,0.999)'": "give optim.betas=[0.9,0.999], with optim=adamw",
    "train_seg optim.lr=0,01": "give optim.lr=0.01",
    "train_seg data.flip=50%": "give data.flip=0.5",
    "train_seg trainer.steps=40k": "give trainer.steps=40000",
    "train_seg trainer.epochs=1h": "there is none in hours",
    "train_seg memory.budget=12000": "memory.budget=12000MiB",
    "train_seg memory.budget=80%": "expected bytes, not a share",
    "plan_memory memory.gpu=4 memory.budget=RTX3090": "give memory.gpus=4 memory.budget=24GiB",
    # Commands of a checkpoint, and of data
    "eval RUN --tta": "give checkpoint=RUN tta.scales=[0.75,1,1.25] tta.flip=true",
    "compare_runs RUN OTHER": "give runs=RUN_DIR or runs=[RUN_DIR,OTHER_RUN], and out=OUT",
    # Advice that would mislead: another group's key, a value of the wrong form, a word that belongs to another.
    "train_seg optim=adamw optim.eps=1e-8": "optim.eps=1e-8: there is none: PyTorch's default holds",
    "train_seg model.name=deeplabv3plus_resnet101": "give head=deeplabv3 body=resnet101",
    "train_seg resume=best": "give run_dir=RUN resume=auto, where RUN",
    "train_seg resume": "resume: expected key=value; give resume=auto",
    "eval checkpoint=RUN --launcher none": "leave it out: without torchrun one process trains",
    "verify_data data=folder data.root=D split=val": "give splits=[val]",
    # Right commands are left alone.
    "train_seg data=folder data.root=DIR 'data.mean=[0.485,0.456,0.406]' run_dir=RUN resume=auto seed=0": "",
    "train_seg optim=adamw optim.lr=1e-3 'data.scale=[0.5,2]' trainer.compile=yes data.workers=2 body=resnet50": "",
}


def test_words_of_others_slips_and_units_are_answered(monkeypatch):
    wrong = {}
    for command, expected in ANSWERS.items():
        program, *words = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [f"{program}.py"])
        assert program in COMMANDS
        said = ""
        try:
            checked(program.replace("plan_memory", "train_seg"), *words)
        except ValueError as error:
            said = str(error)
        if expected not in said or bool(said) != bool(expected) or "\n" in said:
            wrong[command] = said
    assert wrong == {}


@pytest.mark.parametrize(
    "word, said",
    [
        ("init.weights=last", "init.weights=RUN/checkpoints/last.pt; run_dir=RUN resume=auto continues a run"),
        ("init.weights=none", "init.weights=none: leave it out: weights are random"),
        ("init.weights=gone.pt", "init.weights=gone.pt does not exist: expected a file"),
    ],
)
def test_a_file_that_does_not_exist_may_be_another_programs_word(word, said, monkeypatch, tmp_path):
    """A text is right as far as its key knows: the run finds that there is no such file."""
    monkeypatch.setattr(sys, "argv", ["train_seg.py", word, f"run_dir={tmp_path / 'run'}", "trainer.device=cpu"])
    with pytest.raises(SystemExit, match=re.escape(said)):
        train_seg.main()


def test_a_choice_that_exists_is_not_said_to_be_missing(monkeypatch):
    """words.yaml says that there is no focal loss, and no gamma of a loss."""
    wrong = ["loss=focal", "optim.lrr=1"]
    assert "loss=focal: there is none" in Messages("train_seg", SegmentationRun).about(wrong, ValueError())
    monkeypatch.setattr(messages, "choices", lambda *_: ["cross_entropy", "focal"])
    said = Messages("train_seg", SegmentationRun).about(wrong, ValueError())
    assert said == "optim.lrr=1: there is no such key; give optim.lr=1"


def test_a_message_names_each_word_once():
    with pytest.raises(ValueError) as raised:
        checked("train_seg", "lr=0.1", "mixup=1")
    assert str(raised.value).count("mixup:") == 1 and "no such keys as lr; give optim.lr=0.1" in str(raised.value)
