"""Wrong commands, and what each answers: one or two lines in plain English that name the fix."""

import importlib
import os
import shlex
import subprocess
import sys

import pytest

from engine.configuration.command_line import checked
from tests.runs import REPOSITORY

# Command: what its message contains.
ANSWERS = {
    # Keys that do not exist; test_messages.py and test_words.py have more, and other programs' words.
    "train_seg.py trainer.step=20": "there is no such key; give trainer.steps=20",
    "train_seg.py epochs=3": "epochs=3: there is no such key; give trainer.epochs=3",  # not a schedule's [30,60]
    "train_seg.py 'optim={lrr: 0.1}'": "optim.lrr=…: there is no such key; give optim.lr=…",
    # Keys and choices of others.
    "train_seg.py optim=adamw optim.nesterov=true": "optim.nesterov is for optim=sgd; another optim is chosen",
    "train_seg.py experiment=cifar10/resnet14": "is for classification: train_seg.py trains segmentation, ",
    "train_seg.py experiment=camvid/resnext_smal": "the nearest is camvid/resnext_small",
    "train_seg.py +experiment=camvid/resnext_small": "leave out the +: experiment=camvid/resnext_small",
    "eval.py checkpoint=RUN window.size=512,768": "expected one number: windows are squares",
    # Folds, shares and names, which another command writes; arguments with commas between them.
    "train_seg.py data=folder data.folds=5": "give data.fold=0, after python -m scripts.make_classes data.root=DIR",
    "train_seg.py data=folder split=0.8": "leave it out: python -m scripts.make_classes data.root=DIR split=[0.8,0.2]",
    "scripts.make_classes data.root=DIR k_fold=5": "give folds=5",
    "scripts.make_classes data.root=DIR split=0.8": "split=0.8: give split=[0.8,0.2]",
    "scripts.make_classes data.root=DIR val_split=0.25": "give split=[0.75,0.25]",
    "scripts.make_classes data.root=DIR names=[road,car]": "write the names into DIR/classes.json, in place of class_0",
    "train_seg.py data=folder,data.root=DIR": "spaces between arguments, without commas: data=folder data.root=DIR",
    "train_seg.py model.auxiliary_head.loss_decode.loss_weight=0.4": "give head.auxiliary_weight=0.4",
    "eval.py checkpoint=RUN per_image=true": "per_image=true: expected the path to write to, such as per_image=OUT",
    # Words that are not key=value.
    "train_seg.py hydra.verbose=true": "hydra.verbose=true: options of Hydra have no effect here",
    "train_seg.py --nproc-per-node 4": "is an option of torchrun: give it before the program",
    "train_seg.py optim.lr =0.1": "optim.lr: expected key=value without spaces",
    # Values: types, lists, quotes for the shell and for Hydra.
    "train_seg.py optim.lr=0,1": "expected a number above 0; with -m the command runs once for each of several",
    "train_seg.py -m optim.lr=0.1 0.2": "values have commas between them, without spaces: optim.lr=0.1,0.2",
    "scripts.run_table table=table9": "expected one of table1, table2, table3, table4, revnet, memcnn, camvid_table3, ",
    "train_seg.py 'run_dir=${nope}'": "Interpolation key 'nope' not found",
    # Numbers that nobody needs, which no loop is to count to.
    f"train_seg.py head.dilations=[{','.join(2000 * ['1'])}]": "has 2,000 numbers: expected at most 1,000",
    # What must be given.
    "scripts.verify_data splits=[train,foo]": "splits=['train', 'foo']: expected some of train, val",
    "train_seg.py data=camvid": "give data.root=DIR",
}
# Not wrong, though unusual: Hydra takes them.
RIGHT = [
    "train_seg 'init={weights: FILE, part: body}' 'optim={lr: 0.1}' 'data.colour_jitter={hue: 0.1}'",
    "train_seg 'experiment=[camvid/resnext_small]' experiment=camvid/resnext_small.yaml data.root=DIR",
    "scripts.run_table table=table3 +roots.camvid=DIR",
]


def message(command: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a command's message when it ends with exit status 1, without starting a process."""
    program, *arguments = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(program.removesuffix(".py")).main()
    return str(stopped.value.code)


def test_wrong_commands_say_how_to_write_them(monkeypatch, capsys):
    wrong = {}
    for command in ANSWERS:
        said = message(command, monkeypatch)
        first, *more = said.partition("\nExpected layout of ")[0].splitlines()
        if not first.startswith("error: ") or ANSWERS[command] not in first or len(more) > 1:
            wrong[command] = said
    assert wrong == {}
    assert capsys.readouterr() == ("", "")


def ended(*words: str, **environment: str) -> str:
    """Return the message of a process that ends with an error."""
    options = dict(cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    done = subprocess.run([sys.executable, *words], **options)
    assert done.returncode == 1 and done.stdout == ""
    return done.stderr


@pytest.mark.parametrize("command", RIGHT)
def test_right_commands_are_not_refused(command):
    module, *words = shlex.split(command)
    importlib.import_module(module)  # declares the command
    checked(module.rpartition(".")[2], *words)


@pytest.mark.slow
def test_wrong_commands_in_processes_of_their_own(tmp_path):
    """A script, which imports no package of the user's with the name of one of ours; and processes of torchrun."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("raise ImportError('the decoy was imported')")
    said = ended("-m", "scripts.predict", PYTHONPATH=str(tmp_path))
    assert said == "error: checkpoint has no value: give checkpoint=… on the command line\n"
    said = ended("-m", "torch.distributed.run", "--nproc-per-node", "3", "train_seg.py", "trainer.step=20")
    line = "error: trainer.step=20: there is no such key; give trainer.steps=20"
    assert said.count(line) == 1 and said.rstrip("=\n").endswith(line)
