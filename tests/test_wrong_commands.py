"""Wrong commands, and what each answers: one or two lines in plain English that name the fix."""

import importlib
import re
import shlex
import subprocess
import sys
from functools import partial

import pytest
from omegaconf import OmegaConf

from engine.configuration.arguments import check_arguments
from engine.configuration.command_line import composed
from tests.runs import REPOSITORY

# Command: what its message contains.
ANSWERS = {
    # Keys that do not exist: nearly one, in another group, another tool's word.
    "train_seg.py trainer.step=20": "there is no such key; the nearest is trainer.steps=20",
    "train_seg.py trainer.epoch=3": "the nearest is trainer.epochs=3",
    "train_seg.py optim.lrr=0.1": "the nearest is optim.lr=0.1",
    "train_seg.py loss.weight=frequency": "the nearest is loss.class_weights=frequency",
    "train_seg.py optimizer=adamw": "the nearest is optim=adamw",
    "train_seg.py num_workers=4": "the nearest is data.workers=4",
    "train_seg.py trainer.workers=4": "give data.workers=4",
    "train_seg.py lr=0.1": "give optim.lr=0.1",
    "train_seg.py epochs=1": "give trainer.epochs=1",
    "train_seg.py device=cpu": "give trainer.device=cpu",
    "train_seg.py root=/data": "give data.root=/data",
    "train_seg.py weights=a.pt": "give init.weights=a.pt",
    "train_seg.py momentum=0.9": "give norm.momentum=0.9 or optim.momentum=0.9",
    "train_seg.py optimizer.lr=0.1": "give optim.lr=0.1",
    "train_seg.py trainer.batch_size=8": "give data.crops_per_minibatch=8",
    "train_seg.py batch_size=8": "give data.crops_per_minibatch=8",
    "train_seg.py learning_rate=0.1": "give optim.lr=0.1",
    "train_seg.py model=resnet50": "give body=resnet50",
    "train_seg.py dataset=camvid": "give data=camvid",
    "train_seg.py output_dir=runs/a": "give run_dir=runs/a",
    "train_seg.py pretrained=true": "give init.weights=FILE",
    "train_seg.py trainer.amp=true": "give trainer.precision=bfloat16",
    "train_seg.py trainer.foo=1": "trainer.foo=1: there is no such key; --help lists them all",
    "train_seg.py +trainer.foo=1": "trainer.foo=1: there is no such key; --help lists them all",
    "train_seg.py ~trainer.steps": "give trainer.steps=null for no value",
    "train_seg.py data.colour_jitter.brightnes=0.4": "the nearest is data.colour_jitter.brightness=0.4",
    "train_seg.py 'optim={lrr: 0.1}'": "optim.lrr=0.1: there is no such key; the nearest is optim.lr=0.1",
    "train_seg.py data.colour_jitter=0.4": "expected one of the keys data.colour_jitter.brightness, ",
    "eval.py checkpoint=FILE.pt window=1024": "expected one of the keys window.size, window.overlap",
    "eval.py ckpt=FILE.pt": "give checkpoint=FILE.pt",
    "eval.py checkpoint=FILE.pt trainer.device=cpu": "give device=cpu",
    "eval.py checkpoint=FILE.pt split=test": "give data.split=test",
    "scripts.predict checkpoint=FILE.pt input=a.jpg out=DIR": "give output=DIR",
    "scripts.make_classes root=/data/mine": "give data.root=/data/mine",
    "scripts.plan_memory budget=12GiB": "give memory.budget=12GiB",
    # Keys and choices of others.
    "train_seg.py optim=adamw optim.nesterov=true": "is for optim=sgd, optim=sgd_imagenet, optim=sgd_scratch",
    "train_seg.py lr_schedule=cosine lr_schedule.power=0.9": "is for lr_schedule=poly; here lr_schedule is cosine",
    "train_seg.py norm=std norm.gamma_floor=1e-4": "is for norm=inplace, norm=inplace_1; here norm is std",
    "train_seg.py data=camvid data.folds=5": "data.folds is for data=folder; here data is camvid",
    "train_seg.py view=ten_crop": "view=ten_crop is for eval.py",
    "train_seg.py checkpoint=a.pt": "give init.weights=a.pt",
    "train_imagenet.py sampler=class_uniform": "sampler=class_uniform is for train_seg.py",
    "train_imagenet.py data.crop_aspect=2": "data.crop_aspect=2 is for train_seg.py",
    "eval.py checkpoint=FILE.pt norm=std": "is for train_seg.py and train_imagenet.py; a checkpoint keeps its own",
    "train_seg.py experiment=cifar10/resnet14": "experiment=cifar10/resnet14 is for train_imagenet.py",
    "train_imagenet.py experiment=camvid/resnext_small": "is for train_seg.py",
    "train_seg.py experiment=camvid/resnext_smal": "the nearest are camvid/resnext_small, ",
    "train_seg.py data=cifar10": "is for train_imagenet.py; expected one of camvid, cityscapes, ",
    "train_seg.py data=/data/camvid": "a folder is given as data.root=/data/camvid",
    "train_seg.py optim=adam": "there is no such optim; the nearest are adamw, sgd, ",
    "train_seg.py 'norm=[[std]]'": "norm=[[std]]: there is no such norm; the nearest are std, ",
    "train_seg.py norm=null": "norm=null: there is no such norm; the nearest are ",
    "train_seg.py trainer=long": "trainer=long: there is no such trainer; the nearest is default",
    "train_seg.py +experiment=camvid/resnext_small": "leave out the +: experiment=camvid/resnext_small",
    # Words that are not key=value.
    "train_seg.py --lr 0.1": "--lr 0.1: there is no such key; give optim.lr=0.1",
    "train_seg.py --batch-size=8": "give data.crops_per_minibatch=8",
    "train_seg.py --resume auto": "keys have no dashes; give resume=auto",
    "train_seg.py --data /data/camvid": "keys have no dashes; give data.root=/data/camvid",
    "scripts.make_classes --data folder": "keys have no dashes; give data=folder",
    "train_seg.py --nproc-per-node 4": "is an option of torchrun: give it before the program",
    "train_seg.py optim.lr = 0.1": "optim.lr = 0.1: give it without spaces: optim.lr=0.1",
    "train_seg.py optim.lr= 0.1": "give it without spaces: optim.lr=0.1",
    "train_seg.py optim.lr =0.1": "give it without spaces: optim.lr=0.1",
    "train_seg.py 'optim.lr =0.1'": "give it without spaces: optim.lr=0.1",
    "train_seg.py optim.lr 0.1": "expected key=value; give optim.lr=0.1",
    "train_seg.py optim.lr:0.1": "expected key=value; give optim.lr=0.1",
    "train_seg.py camvid/resnext_small": "give experiment=camvid/resnext_small",
    "eval.py FILE.pt": "FILE.pt: expected key=value; give checkpoint=FILE.pt",
    "scripts.predict checkpoint=FILE.pt photo.jpg": "give input=photo.jpg",
    "scripts.convert_checkpoint FILE.pth": "give input=FILE.pth",
    "scripts.make_classes /data/mine": "give data.root=/data/mine",
    "scripts.compare_runs runs/a runs/b": "give 'runs=[runs/a,runs/b]'",
    "scripts.compare_runs runs=runs/a,runs/b": "expected a list of words; give 'runs=[runs/a,runs/b]'",
    "train_seg.py help": "help: expected key=value; --help lists the keys",
    # Values: types, lists, quotes for the shell and for Hydra.
    "train_seg.py trainer.epochs=1.5": "trainer.epochs=1.5: expected a whole number",
    "train_seg.py optim.lr=abc": "optim.lr=abc: expected a number",
    "train_seg.py optim.lr=": "optim.lr=: expected a number",
    "train_seg.py optim.lr=0,1": "expected a number; -m runs the command once with each value",
    "train_seg.py norm=std,inplace": "expected one choice; -m runs the command once with each",
    "train_seg.py trainer.compile=maybe": "expected true or false",
    "train_seg.py trainer.precision=fp16": "expected one of float32, bfloat16, float16",
    "train_seg.py head.dilations=12": "expected a list of whole numbers; give 'head.dilations=[12]'",
    "train_seg.py head.dilations=12 head.dilations=24": "give 'head.dilations=[12,24]'",  # {12,24} in bash
    "train_seg.py 'head.dilations=(12,24)'": "expected a list; give 'head.dilations=[12,24]'",
    "train_seg.py head.dilations=null": "head.dilations=null: expected a list of whole numbers",
    "scripts.compare_runs 'runs=[a/optim.lr=0.1,b]'": """Hydra needs quotes of its own here, as in 'runs=["a=b",c]'""",
    "scripts.run_table 'weights={a: b=c}'": """Hydra needs quotes of its own here, as in 'weights={key: "a=b"}'""",
    "train_seg.py head.dilations=[12, 24, 36]": "quote lists and mappings for the shell: 'head.dilations=[12, 24, 36]'",
    "train_seg.py 'head.dilations=[12,24'": "a bracket is not closed; quote lists and mappings for the shell",
    "eval.py checkpoint=FILE.pt tta.scales=0.7,1,1.2": "expected a list of numbers; give 'tta.scales=[0.7,1,1.2]'",
    "scripts.verify_data data=camvid splits=train": "expected a list of words; give 'splits=[train]'",
    "scripts.run_table table=table3 overrides=trainer.epochs=3": "give 'overrides=[trainer.epochs=3]'",
    "scripts.run_table table=table3 weights={resnext101: FILE}": "'weights={resnext101: FILE}'",
    "train_seg.py data.root=/data/Straße": """Hydra needs quotes of its own here; give 'data.root="/data/Straße"'""",
    "train_seg.py data.root=/data/a,b": """expected text; give 'data.root="/data/a,b"'""",
    "train_seg.py data.root=/my streets": "quote a value with spaces: 'data.root=/my streets'",
    "train_seg.py memory.budget=12 GiB": "quote a value with spaces: 'memory.budget=12 GiB'",
    "train_seg.py data.train_split=train,val": "expected a list of words; give 'data.train_split=[train,val]'",
    "train_seg.py 'trainer.steps=(3)'": "trainer.steps=(3): expected a whole number",
    "train_seg.py -m trainer.step=1,2": "the nearest is trainer.steps=1,2",
    "train_seg.py 'run_dir=${nope}'": "Interpolation key 'nope' not found",
    # What must be given.
    "eval.py": "checkpoint has no value: give checkpoint=…",
    "eval.py checkpoint=gone.pt": "does not exist: expected a file such as RUN_DIR/checkpoints/last.pt",
    "scripts.predict checkpoint=FILE.pt input=photo.jpg": "output has no value: give output=…",
    "scripts.make_classes": "give data.root=DIR",
    "scripts.verify_data data=folder": "give data.root=DIR",
    "train_seg.py data=camvid": "give data.root=DIR",
}
# Not wrong, though unusual: Hydra takes them.
RIGHT = [
    "train_seg 'init={weights: FILE, part: body}' 'optim={lr: 0.1}' 'data.colour_jitter={hue: 0.1}'",
    "train_seg 'experiment=[camvid/resnext_small]' experiment=camvid/resnext_small.yaml data.root=DIR",
    "train_seg hydra/job_logging=none hydra.verbose=true 'run_dir=runs/${hydra:job.name}'",
    "train_seg -m lr_schedule=step,multistep lr_schedule.factor=0.1",
    "train_seg --config-dir=DIR norm=mine",
    "eval --hydra-help",
    "eval --version",
    "scripts.run_table table=table3 +roots.camvid=DIR",
]
SOME = [command for number, command in enumerate(ANSWERS) if number % (len(ANSWERS) // 6) == 0]


def message(command: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command prints before it ends with exit status 1, without starting a process."""
    program, *arguments = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(program.removesuffix(".py")).main()
    return str(stopped.value.code)


def check(commands: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    wrong = {}
    for command in commands:
        said = message(command, monkeypatch)
        first, *more = said.partition("\nExpected layout of ")[0].splitlines()
        if not first.startswith("error: ") or ANSWERS[command] not in first or len(more) > 1:
            wrong[command] = said
    assert wrong == {}
    assert capsys.readouterr() == ("", "")


def ended(*words: str) -> str:
    """What a process prints that ends with an error."""
    done = subprocess.run([sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout == ""
    return done.stderr


def test_some_wrong_commands_say_how_to_write_them(monkeypatch, capsys):
    check(SOME, monkeypatch, capsys)


@pytest.mark.parametrize("command", RIGHT)
def test_right_commands_are_not_refused(command):
    module, *arguments = shlex.split(command)
    importlib.import_module(module)  # declares the command
    name = module.rpartition(".")[2]
    schema = OmegaConf.get_type(composed(name))
    check_arguments(name, arguments, schema, partial(composed, name))


@pytest.mark.slow
def test_every_wrong_command_says_how_to_write_it(monkeypatch, capsys):
    assert len(ANSWERS) >= 80
    check(list(ANSWERS), monkeypatch, capsys)


@pytest.mark.slow
def test_wrong_commands_in_processes_of_their_own():
    """Processes of torchrun: one says what all find."""
    said = ended("-m", "torch.distributed.run", "--nproc-per-node", "3", "train_seg.py", "trainer.step=20")
    message = re.escape("error: trainer.step=20: there is no such key; the nearest is trainer.steps=20\n")
    assert re.match(message, said) and len(re.findall(message, said)) == 2  # torchrun's table repeats it
    assert "<NO_OTHER_FAILURES>" in said and said.count("Traceback") == 1  # of torchrun itself
