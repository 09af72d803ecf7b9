"""Wrong commands, and what each answers: one or two lines in plain English that name the fix."""

import importlib
import os
import shlex
import subprocess
import sys

import pytest

from tests.runs import REPOSITORY, checked

# Command: what its message contains. test_words.py reaches every word of other programs; here are the rules.
ANSWERS = {
    # Keys that do not exist, and choices of others.
    "train_seg.py trainer.step=20": "there is no such key; give trainer.steps=20",
    "train_seg.py epochs=3": "epochs=3: there is no such key; give trainer.epochs=3",  # not a schedule's [30,60]
    "train_seg.py 'optim={lrr: 0.1}'": "optim.lrr=…: there is no such key; give optim.lr=…",
    "train_seg.py optim=adamw optim.nesterov=true": "optim.nesterov is for optim=sgd; another optim is chosen",
    "train_seg.py experiment=cifar10/resnet14": "is for classification: train_seg.py trains segmentation, ",
    "train_seg.py experiment=camvid/resnext_smal": "the nearest is camvid/resnext_small",
    "train_seg.py 'norm=[inplac]'": "there is no such norm; the nearest are inplace, inplace_1",
    "train_seg.py 'optim=[sgd],seed=1'": "spaces between arguments, without commas: optim=[sgd] seed=1",
    "train_seg.py +experiment=camvid/resnext_small": "leave out the +: experiment=camvid/resnext_small",
    "train_seg.py lr_schedule=cosin": "the nearest is cosine",
    "train_seg.py trainer.interval=10": "give trainer.log_every_steps, trainer.evaluate_every_steps or trainer.checkp",
    "train_seg.py foo.backend=gloo": "there is no such key; --help lists them all",
    # Words of other programs; several are answered at once.
    "train_seg.py batch_size=4 num_workers=2 mixup=1": "no such keys as batch_size and num_workers; give "
    "data.crops_per_minibatch=4 data.workers=2; mixup: there is none",
    "train_seg.py norm=GN loss=dice": "norm=GN: there is none: expected a batch normalisation, norm=inplace or norm",
    "train_imagenet.py /data/imagenet --model resnet50 -b 256 --input-size 3 224 224 -j 8": "give "
    "data.root=/data/imagenet body=resnet50 data.crops_per_minibatch=256 data.crop_size=224 data.workers=8",
    "train_seg.py --opts SOLVER.IMS_PER_BATCH 8 SOLVER.STEPS '(30000,)'": "give data.crops_per_minibatch=8 "
    "lr_schedule.steps=[30000] lr_schedule.epochs=null, with lr_schedule=multistep; --opts: leave it out",
    "train_seg.py param_scheduler.0.type=PolyLR 'param_scheduler[0].power=0.9'": "lr_schedule=poly lr_schedule.power=0",
    "train_seg.py optim_wrapper.optimizer.type=AdamW": "there is no such optim; give optim=adamw",
    "train_seg.py --opt adam --lr 1e-3": "give optim=adamw optim.weight_decay=0 optim.lr=1e-3",
    "train_seg.py encoder_name=resnet34 encoder_weights=imagenet": "give body=torchvision body.network=resnet34 "
    "body.weights=published norm=std",
    "train_seg.py --config configs/train_seg.yaml": "leave it out: it is what the program starts from",
    "scripts.export checkpoint=RUN output=n.onnx opset=17": "there is none: the file has the opset that torch.onnx",
    "train_seg.py trainer.device=mps": "expected auto, cpu or cuda",
    "scripts.plan_memory memory.gpu=4 memory.budget=RTX3090": "give memory.gpus=4 memory.budget=24GiB",
    "scripts.make_classes data.root=DIR val_split=0.25": "give split=[0.75,0.25]",
    "train_seg.py lr_schedule=reduce_on_plateau": "nor can a plugin add it: give lr_schedule=cosine, poly or",
    "train_seg.py logger=wandb": "RUN/tensorboard, which wandb.init(sync_tensorboard=True) follows; a plugin adds it",
    "train_seg.py 'scores=[f1]'": "there is no such score; the nearest is dice",
    "train_seg.py 'scores=[1]'": "scores=[1]: there is no such score; the nearest is dice",
    "train_seg.py 'scores=[null]'": "scores=[null]: there is no such score; the nearest is dice",
    "train_seg.py 'scores=[{}]'": "scores=[{}]: there is no such score; the nearest is dice",
    "train_seg.py -m 'scores=[1],[2]'": "scores=[1]: there is no such score; the nearest is dice",
    "train_seg.py 'augmentations=[1]'": "there is no such augmentation; a plugin adds it: docs/extending.md",
    "scripts.export size.x=1": "size.x=1: there is no such key; --help lists them all",
    "train_seg.py --weights-backbone ResNet50_Weights.IMAGENET1K_V1": "give body=torchvision body.network=resnet50 "
    "body.weights=published norm=std",
    "train_seg.py trainer.overfit_batches=10": "and give data.train_split=few data.val_split=few",
    "train_seg.py device=0,1": "start it as CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node N train_seg.py …",
    "eval.py RUN --task test": "give checkpoint=RUN data.split=test",  # ultralytics: the split
    "scripts.predict source=DIR project=OUT name=exp": "there are no such keys as source and project; give input=DIR "
    "output=OUT; name: leave it out",
    "scripts.predict -i DIR -o OUT": "; give checkpoint=RUN_DIR input=IMAGES output=DIR",
    "scripts.predict checkpoint=RUN input=DIR/a.png DIR/b.png": "give input=DIR",  # a pattern that the shell expanded
    "scripts.export checkpoint=RUN half=true opset=17": "there is no such key as half; give precision=float16; opset:",
    "eval.py RUN --tta": "give checkpoint=RUN tta.scales=[0.75,1,1.25] tta.flip=true",
    # Advice that would mislead: another group's key, a value of the wrong form, a word that belongs to another.
    "train_seg.py optim=adamw optim.eps=1e-8": "optim.eps=1e-8: there is none: PyTorch's default holds",
    "train_seg.py model.name=deeplabv3plus_resnet101": "give head=deeplabv3 body=resnet101",
    "train_seg.py resume=best": "give run_dir=RUN resume=auto, where RUN",
    "train_seg.py resume": "resume: expected key=value; give resume=auto",
    "eval.py checkpoint=RUN --launcher none": "leave it out: without torchrun one process trains",
    "scripts.verify_data data=folder data.root=D split=val": "give splits=[val]",
    "train_seg.py --test-only --resume RUN/last.pt": "this command trains: python eval.py checkpoint=RUN/last.pt score",
    "train_seg.py config=RUN/config.yaml": "there is no such key; give run_dir=RUN resume=auto",
    "eval.py RUN/config.yaml RUN/last.pt": "give checkpoint=RUN/last.pt; RUN/config.yaml: leave it out",
    "train_seg.py data=D/data.yaml": "give data=folder data.root=DIR, the folder that its path names",
    "train_seg.py loss._target_=mine.FocalLoss": "a class of your own becomes a choice by a plugin",
    # Words that are not key=value.
    "train_seg.py hydra.job.env_set.FOO=1": "there is no such key; +hydra.job.env_set.FOO=1 adds it",
    "train_seg.py hydra.callbacks.x._target_=a.B": "+hydra.callbacks.x._target_=a.B adds it",
    "train_seg.py hydra.verbos=true": "hydra.verbos: Key 'verbos' not in 'HydraConf'",
    "train_seg.py --cfg x.yaml": "argument --cfg/-c: invalid choice: 'x.yaml'",
    "train_seg.py --resolve": "The --resolve flag can only be used in conjunction with --cfg",
    "train_seg.py --config-dir GONE": "GONE' not found",
    "train_seg.py --config-name gone": "Cannot find primary config 'gone'",
    "train_seg.py --config-name finetune_resnet50": "as experiment=NAME; there is no such experiment; the nearest is c",
    "train_seg.py optim=null": "optim=null: there is no such optim; the nearest are ",
    "train_seg.py debug=null": "debug=null: there is no such debug; the nearest are ",
    "train_seg.py hydra.run.dir=OUT": "give run_dir=OUT, the folder of the run",
    "train_seg.py -p 10": "-p 10: keys have no dashes",
    "train_seg.py +optim.foo=1": "optim.foo=1: there is no such key",
    "train_seg.py ++optim={foo:1}": "leave out the +: optim={foo:1}",
    "train_seg.py +foo=1": "foo=1: there is no such key",
    "train_seg.py ~optim.lr": "~optim.lr: leave optim.lr out to keep its default",
    "train_seg.py norm@norm=std": "Could not override 'norm@norm'. Did you mean to override norm?",
    "train_seg.py hydra/launcher=nope": "Could not find 'hydra/launcher/nope'",
    "train_seg.py --nproc-per-node 4": "start it as torchrun --nproc-per-node 4 train_seg.py …",
    "train_seg.py --standalone --rdzv-backend c10d": "leave it out: torchrun's options before the program say it",
    "scripts.predict checkpoint=RUN --nproc-per-node 4": "torchrun starts train_seg.py, train_imagenet.py and eval.py",
    "train_seg.py optim.lr =0.1": "optim.lr and =0.1: expected key=value without spaces; --help lists the keys",
    "train_seg.py epochs=3 foo": "epochs: give trainer.epochs=3; foo: expected key=value without spaces",
    "train_seg.py data=folder,data.root=DIR": "spaces between arguments, without commas: data=folder data.root=DIR",
    # Values: slips and units, types, lists, quotes for the shell and for Hydra.
    "train_seg.py data.crop_size=512*1024": "give data.crop_size=512 data.crop_aspect=2",
    "train_seg.py 'optim.betas=(0.9,0.999)'": "give optim.betas=[0.9,0.999], with optim=adamw",
    "train_seg.py optim.lr=0,01": "give optim.lr=0.01",
    "train_seg.py data.flip=50%": "give data.flip=0.5",
    "train_seg.py data.flip=50": "give data.flip=0.5",
    "train_seg.py trainer.epochs=0.5": "give trainer.steps=N instead",
    "train_seg.py loss=lovasz_softmax": "give loss=library loss.kind=lovasz",
    "eval.py checkpoint=RUN metrics=[mIoU,mDice]": "give scores=[dice]; mIoU and",
    "train_seg.py data.scale=0.5": "expected the smallest and the largest factor",
    "train_seg.py optim.lr=1e−3": "give optim.lr=1e-3",
    "train_seg.py memory.budget=12000": "memory.budget=12000MiB",
    "train_seg.py optim.lr=0,1": "expected a number above 0; with -m the command runs once for each of several",
    "train_seg.py -m 'optim.lr=[0.01,0.1]'": "with -m the command runs once for each of several: optim.lr=0.01,0.1",
    "train_seg.py -m optim.lr=0.1 0.2": "values have commas between them, without spaces: optim.lr=0.1,0.2",
    "train_seg.py 'run_dir=${nope}'": "Interpolation key 'nope' not found",
    "eval.py checkpoint=RUN per_image=true": "per_image=true: expected the path to write to, such as per_image=OUT",
    # Numbers that nobody needs, which no loop is to count to.
    f"train_seg.py head.dilations=[{','.join(2000 * ['1'])}]": "has 2,000 numbers: expected at most 1,000",
    # What must be given.
    "scripts.verify_data splits=[train,foo]": "splits=['train', 'foo']: expected some of train, val",
    "train_seg.py data=camvid": "give data.root=DIR",
}
# Not wrong, though unusual.
RIGHT = [
    "train_seg 'init={weights: FILE, part: body}' 'optim={lr: 0.1}' 'data.colour_jitter={hue: 0.1}'",
    "train_seg 'experiment=[camvid/resnext_small]' experiment=camvid/resnext_small.yaml data.root=DIR",
    "train_seg data=folder data.root=DIR 'data.mean=[0.485,0.456,0.406]' run_dir=RUN resume=auto seed=0",
    "train_seg optim=adamw optim.lr=1e-3 'data.scale=[0.5,2]' trainer.compile=yes data.workers=2 body=resnet50",
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
        answer = message(command, monkeypatch)
        first, *next_lines = answer.partition("\nExpected layout of ")[0].splitlines()
        if not first.startswith("error: ") or ANSWERS[command] not in first or len(next_lines) > 1:
            wrong[command] = answer
    assert wrong == {}
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", RIGHT)
def test_right_commands_are_not_refused(command):
    module, *words = shlex.split(command)
    importlib.import_module(module)  # declares the command
    checked(module.rpartition(".")[2], *words)


def ended(*words: str, **environment: str) -> str:
    """Return the message of a process that ends with an error."""
    options = dict(cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    done = subprocess.run([sys.executable, *words], **options)
    assert done.returncode == 1 and done.stdout == ""
    return done.stderr


@pytest.mark.slow
def test_wrong_commands_in_processes_of_their_own(tmp_path):
    """A script, which imports no package of the user's with the name of one of ours; and processes of torchrun."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("raise ImportError('the decoy was imported')")
    answer = ended("-m", "scripts.predict", PYTHONPATH=str(tmp_path))
    assert answer == "error: checkpoint has no value: give checkpoint=… on the command line\n"
    answer = ended("-m", "torch.distributed.run", "--nproc-per-node", "3", "train_seg.py", "trainer.step=20")
    line = "error: trainer.step=20: there is no such key; give trainer.steps=20"
    assert answer.count(line) == 1 and answer.rstrip("=\n").endswith(line)


def test_an_error_that_no_word_explains_is_raised_as_it_is(monkeypatch):
    def compose(*_):
        raise TypeError("a fault of another kind")

    monkeypatch.setattr("hydra.compose", compose)
    with pytest.raises(TypeError, match="a fault of another kind"):
        checked("train_seg", "optim.lr=0.1")


def test_a_file_that_does_not_exist_may_be_another_programs_word(monkeypatch, tmp_path):
    """A text is right as far as its key knows: the run finds that there is no such file."""
    command = f"train_seg.py init.weights=last run_dir={tmp_path / 'run'} trainer.device=cpu"
    answer = "init.weights=RUN/checkpoints/last.pt; run_dir=RUN resume=auto continues a run"
    assert answer in message(command, monkeypatch)


def test_a_path_that_the_shell_has_split_is_quoted(monkeypatch, tmp_path):
    (tmp_path / "my own images").mkdir()
    answer = message(f"train_seg.py data.root={tmp_path}/my own images seed=0", monkeypatch)
    assert answer.endswith(f"quote the space for the shell, as in 'data.root={tmp_path}/my own images'")


def test_a_message_names_each_word_once(monkeypatch):
    answer = message("train_seg.py lr=0.1 mixup=1", monkeypatch)
    assert answer.count("mixup:") == 1 and "no such key as lr; give optim.lr=0.1" in answer
