"""The words of other programs in words.yaml: each entry is reached, and what it gives can be given."""

import functools
import importlib
import itertools
import re
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from engine.configuration.arguments import Argument
from engine.configuration.choices import choices, groups_in
from engine.configuration.command_line import SCHEMAS
from engine.configuration.messages import Messages
from engine.configuration.texts import fits
from engine.configuration.words import ALONE, SLIP, Advice, advice_about, entries, pairs_in
from engine.schema import keys
from engine.schema.keys import CHOICES, declared_in
from engine.schema.segmentation import Loss, SegmentationRun
from tests.choices import forgotten
from tests.engine.configuration.test_command_line import COMMANDS as MODULES

for module in MODULES.values():
    importlib.import_module(module)  # declares the command
COMMANDS = {name: SCHEMAS[name] for name in MODULES} | {"plan_memory": SegmentationRun}
ENTRIES = [(word, entry) for word, about_word in entries().items() for entry in about_word]
VALUES = (
    "anything true false 0 4 0.9 16 bf16 32 gpu imagenet a.pt a/b.pt x.yaml configs/experiment/x.yaml a.jpg RUN DIR/x "
    "RUN/checkpoints/last.pt RUN/last.ckpt last.pt [512,1024] 512x1024 512x512 [3,224,224] [3,224,256] checkpointing "
    "adam momentum lion MultiStepLR PolyLR CosineAnnealingLR LinearLR constant plateau onecycle VOC2012 coco mapillary "
    "imagenet-1k flowers102 BN SyncBN iABN GN LeakyReLU ReLU gelu none CrossEntropyLoss OHEM DiceLoss timm/resnet50 "
    "tu-resnet50d torchvision.resnet50 8 152 unet deeplab UPerHead resnet-18 ResNetV1c resnet152 resnext resnext50 "
    "wrn38 densenet mit_b0 regnet_y_400mf mobilenet_v2 mobilenetv3 convnext efficientnet convnext_tiny class_balanced "
    "default mps ddp o1 AmpOptimWrapper OptimWrapper 1h 12000 12G 512M 80% 0.5 RTX3090 RTX2080Ti 5090 A6000 H100 "
    "RTX3080 V100 A100 RTX1080 -1 epoch open-mmlab://resnet50 latest horizontal [123.675,116.28,103.53] 95% 1 a/*.png "
    "torchscript engine mine.FocalLoss 3 1e−3 −1 data.yaml RUN/config.yaml configs/train_seg.yaml "
    "DiceCELoss FocalLoss TverskyLoss LovaszLoss balanced mDice "
    "early_stopping IoULoss BCELoss my/data softmax2d [1,2.5] data/camvid [512,512] 95 "
    "all x.py mIoU table3 slide fit . 50 CityscapesDataset nvidia/mit-b0 fcn_resnet50 lraspp_mobilenet_v3_large"
).split() + [""]


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str, str], Advice]:
    """{(command, word, value): the advice}, of every word in words.yaml and the values above that its entries take."""
    advice_by_word, program = {}, sys.argv[0]
    for command, schema in COMMANDS.items():
        sys.argv[0] = f"{command}.py"
        keys = {*declared_in(schema), *groups_in(command.replace("plan_memory", "train_seg"))}
        for word, entry in ENTRIES:
            values = [value for value in VALUES if entry.value.fullmatch(value)] if entry.value else VALUES[:2]
            for value in values:
                if advice := advice_about(word, value, keys):
                    advice_by_word[command, word, value] = advice
    sys.argv[0] = program
    return advice_by_word


def test_every_word_is_answered(answers):
    answered = {word for _, word, _ in answers}
    assert sorted(entries().keys() - {SLIP} - answered) == []


def test_every_entry_is_reached(answers):
    """An entry that others above it hide is as good as none. A group's value may change what it gives."""
    texts = [f"{give} {text}" for give, text in answers.values()]
    fixed = {
        re.split(r"\\|\{", entry.give or entry.say)[0]
        for word, entry in ENTRIES
        if word != SLIP and " " not in entry.command
    }
    assert [text for text in fixed if not any(text in answer for answer in texts)] == []


def test_keys_and_choices_that_are_advised_exist(answers):
    wrong = []
    declared = {command: declared_in(schema) for command, schema in COMMANDS.items()}
    choices_of, groups_of = functools.cache(choices), functools.cache(groups_in)
    for (command, word, value), (give, _) in answers.items():
        for key, _, advised in (pair.partition("=") for pair in give.split()):
            if advised == "null" or advised in value or key not in declared[command]:
                continue
            allowed = declared[command][key].metadata.get("one_of")
            if key in groups_of(command):
                allowed = choices_of(key, COMMANDS[command])
            if command != "make_classes" and allowed is not None and advised not in allowed:
                wrong.append(f"{command} {word}={value}: {give}")
    assert wrong == []


def test_right_values_of_our_keys_are_left_alone():
    for command, schema in COMMANDS.items():
        keys = {*declared_in(schema)}
        for key, declared in declared_in(schema).items():
            for value in declared.metadata.get("one_of") or ():
                assert advice_about(key, str(value), keys) is None, f"{command} {key}={value}"


@dataclass
class FocalLoss(Loss):
    name: str = "focal"
    gamma: float = keys.key(2.0, least=0)
    label_smoothing: float = keys.key(0.0, least=0)
    drop_rate: float = keys.key(0.0, least=0)
    builds: ClassVar[str] = "module.Name"


def test_a_new_choice_and_its_keys_are_right_whatever_other_programs_mean_by_them(monkeypatch):
    """words.yaml answers loss=focal, gamma=1 and label_smoothing=0.1, and need not know that they are there now."""
    with forgotten():
        keys.choice("loss")(FocalLoss)
        messages = Messages("train_seg", SegmentationRun)
        for group in CHOICES.keys() & messages.groups.keys():
            for choice in choices(group, SegmentationRun):
                assert messages._advice(Argument(f"{group}={choice}", group, choice)) is None, f"{group}={choice}"
        assert advice_about("loss", "focal", {"loss"}) and "focal" in choices("loss", SegmentationRun)
        assert hidden_keys("train_seg", SegmentationRun, monkeypatch) == HIDDEN


# For a training gpus is the number of processes, fraction another program's share of the images, and patience is of
# epochs or of evaluations.
HIDDEN = {"gpus", "fraction", "patience"}
SAMPLES = ("true", "false", "0", "1", "8", "0.5", "[1,2]", "auto", "null")  # texts may have any value


@pytest.mark.slow
def test_no_entry_hides_what_exists(monkeypatch):
    """A key with a right value, or its last part: an entry may only give a key that ends so."""
    hidden = set().union(*(hidden_keys(command, schema, monkeypatch) for command, schema in COMMANDS.items()))
    assert hidden == HIDDEN, "entries of words.yaml hide keys that exist: take these out of their `word`"


def hidden_keys(command, schema, monkeypatch) -> set[str]:
    """Names of keys, or their last parts, for which another key is advised."""
    monkeypatch.setattr(sys, "argv", [f"{command}.py"])
    messages, hidden = Messages(command.replace("plan_memory", "train_seg"), schema), set()
    for name, declared in declared_in(schema).items():
        samples = ("null",) if declared.kind in (str, str | None) else SAMPLES
        values = [
            *map(str, declared.metadata.get("one_of") or ()),
            *(sample for sample in samples if fits(sample, declared)),
        ]
        last = name.rpartition(".")[2]
        names = {name, last} if last != "name" else set()  # of a choice, which GROUP=NAME gives
        for word, value in itertools.product(names, values):
            if advice_about(word, value, messages.keys) is None:
                continue
            give, _ = messages._advice(Argument(f"{word}={value}", word, value)) or (f"{word}=", "")
            if last not in {our_key.rpartition(".")[2] for our_key in pairs_in(give)}:
                hidden.add(word)
    return hidden


def test_pairs_of_several_words():
    assert pairs_in("data.root=my images data.flip=0") == {"data.root": "my images", "data.flip": "0"}
    assert advice_about(ALONE, "last.pt", {"checkpoint"}) == ("checkpoint=last.pt", "give checkpoint=last.pt")


def test_ratios_are_computed_where_they_can_be():
    messages = Messages("train_seg", SegmentationRun)
    for value, aspect in (("512x1024", "2"), ("0x256", "256/0")):
        answer = messages.message([f"img_size={value}"], ValueError("unknown"))
        assert answer.endswith(f"give data.crop_size={value.partition('x')[0]} data.crop_aspect={aspect}")


# Of rates, shares, sizes and folders: another program's word and value, what it means there, and ours for the same.
UNITS = [
    ("train_seg", "lr0", "0.01", "optim.lr=0.01"),  # ultralytics: the first rate
    ("train_seg", "lrf", "0.01", "x optim.lr"),  # ultralytics: the last rate is lr0 * lrf
    ("train_seg", "eta_min_ratio", "0.01", "x optim.lr"),  # mmengine: eta_min = base_lr * ratio
    ("train_seg", "eta_min", "0.001", "lr_schedule.end=0.001"),  # PyTorch: a rate
    ("train_seg", "blr", "0.001", "x data.crops_per_minibatch / 256"),  # MAE: lr = blr * batch / 256
    ("train_seg", "bn_momentum", "0.1", "norm.momentum=0.1"),  # PyTorch: running = 0.9 * running + 0.1 * new
    ("train_seg", "bn_momentum", "0.99", "1 - 0.99"),  # TensorFlow: running = 0.99 * running + 0.01 * new
    ("train_seg", "ema_momentum", "0.001", "so it is 1 - 0.001"),  # mmengine: average += 0.001 * (new - average)
    ("train_seg", "momentum", "0.9", "optim.momentum=0.9"),  # PyTorch's SGD; of norms bn_momentum
    ("train_seg", "lr_schedule.warmup_steps", "5%", "N, 5% x trainer.steps"),  # a share of the steps
    ("train_seg", "ema_decay", "0.999", "trainer.ema_decay=0.999"),  # timm: average = 0.999 * average + 0.001 * new
    ("train_seg", "scale_limit", "0.5", "[0.5,1.5]"),  # albumentations: factors 1 - 0.5 to 1 + 0.5
    ("train_seg", "ratio_range", "[0.5,2.0]", "data.scale=[0.5,2.0]"),  # mmsegmentation: factors
    ("train_seg", "scale", "[512,512]", "data.base_size=N"),  # mmsegmentation's Resize: pixels
    ("train_seg", "fraction", "0.5", "no key trains on a part of the images"),  # ultralytics: of the images
    ("train_seg", "warmup_ratio", "0.1", "warmup_steps=N"),  # Hugging Face: of the steps; mmcv: of the rate
    ("train_seg", "min_size_train", "512", "data.base_size, the longest side"),  # detectron2: the shortest side
    ("train_seg", "max_size_train", "2048", "data.base_size=2048"),  # detectron2: the longest side
    ("train_seg", "lr_gamma", "0.1", "lr_schedule.factor=0.1"),  # PyTorch: the rate is multiplied by it
    ("train_seg", "class_weights", "[1,2.5]", "loss.class_weights=[1,2.5]"),  # PyTorch: factors of pixels' losses
    ("train_seg", "test_split", "test", "eval.py checkpoint=RUN data.split=test"),  # scored once, never chosen on
    ("eval", "stride", "341", "the share of a side"),  # mmsegmentation: pixels between windows
    # Hugging Face: a step has batch * devices * gradient_accumulation_steps; ours is of the step
    ("train_seg", "per_device_train_batch_size", "8", "8 x devices x trainer.accumulation_steps"),
    ("train_seg", "samples_per_gpu", "2", "2 x devices x"),  # mmcv: a step has batch * devices
    ("train_seg", "ims_per_batch", "16", "data.crops_per_minibatch=16"),  # detectron2: of a step, on all devices
    ("train_seg", "per_device_eval_batch_size", "4", "trainer.evaluate_batch_size=4"),  # at once, on a device
    ("train_seg", "hsv_h", "0.015", "data.colour_jitter.hue=0.015"),  # ultralytics: hue = (hue + r * h) % 1, r in ±1
    ("train_seg", "hsv_v", "0.4", "data.colour_jitter.brightness=0.4"),  # ultralytics: value *= 1 + r * v
    # timm: ColorJitter(0.4, 0.4, 0.4), brightness, contrast and saturation, each times 1 - s to 1 + s
    ("train_seg", "color_jitter", "0.4", "brightness=0.4 data.colour_jitter.contrast=0.4 data.colour_jitter.satura"),
    # mmsegmentation: brightness ± 32 of 255, contrast and saturation times 0.5 to 1.5, hue ± 18 of 180 degrees
    ("train_seg", "photo_metric_distortion", "true", "brightness=0.125 data.colour_jitter.contrast=0.5"),
    ("train_seg", "imgsz", "640", "data.base_size=640 data.crop_size=640"),  # ultralytics: the longest side
    ("eval", "imgsz", "640", "data.base_size=640 for segmentation"),
    ("eval", "data.image_folder", "images", "are called as in the training, so rename them, or link"),
    ("train_seg", "multi_scale", "0.5", "so 0.5 is data.scale=[0.5,1.5]"),  # ultralytics: 1 - 0.5 to 1 + 0.5
    ("train_seg", "patience", "50", "if 50 is of epochs, N is 50 / trainer.evaluate_every_epochs"),  # ours: evaluations
    ("train_seg", "patience_epochs", "10", "no schedule gets a score"),  # timm: of the plateau schedule
    (
        "train_seg",
        "nbs",
        "64",
        "trainer.accumulation_steps, 64 / the crops",
    ),  # ultralytics: steps of round(nbs / batch)
    ("train_seg", "decay_epochs", "30", "all multiples of 30"),  # timm: rate * factor ** (epoch // 30)
    ("train_seg", "lr_step_size", "30", "all multiples of 30"),  # PyTorch's StepLR: gamma ** (epoch // 30)
    ("train_seg", "decay_epochs", "[30,60]", "lr_schedule.epochs=[30,60]"),  # timm's MultiStep: these epochs
    ("train_seg", "steps_per_epoch", "250", "epochs x 250"),  # Keras: an epoch is 250 steps
    ("train_seg", "limit_train_batches", "0.1", "for a part of the images"),  # Lightning: of each epoch
    ("train_seg", "limit_val_batches", "10", "N is 10 x the images of a batch"),  # Lightning: batches
    ("train_seg", "frozen_stages", "1", "none for some layers or stages"),  # mmsegmentation: stem and first stage
    ("train_seg", "frozen_stages", "4", "give body.frozen=true"),  # of four
    ("train_seg", "oversample_foreground_percent", "0.33", "sampler.fraction=0.33"),  # nnU-Net: share of the crops
    ("train_imagenet", "crop_pct", "0.875", "data.crop_size / 0.875"),  # timm: resize = floor(size / crop_pct)
    ("train_imagenet", "scale", "[0.08,1.0]", "8 to 100 % of an image"),  # timm: of the area
    ("train_imagenet", "smoothing", "0.1", "the loss of a classification is cross-entropy"),  # no group `loss`
    ("predict", "project", "OUT", "output=OUT"),  # ultralytics: project/name is the folder
    ("train_seg", "img_dir", "pictures", "data.image_folder=pictures"),  # mmsegmentation: below data_root
    ("train_seg", "ann_dir", "masks", "data.label_folder=masks"),
    ("train_seg", "img_dir", "/data/leaves/images", "give data.root=DIR, the dataset's folder, and the names"),
]


@pytest.mark.parametrize("command, word, value, ours", UNITS, ids=[f"{word}={value}" for _, word, value, _ in UNITS])
def test_rates_shares_sizes_and_folders_keep_their_meaning(command, word, value, ours):
    schema = COMMANDS[command]
    messages = Messages(command, schema)
    answer = messages.message([f"{word}={value}"], ValueError("unknown"))
    assert ours in answer, answer


def test_every_word_for_a_rate_a_share_or_a_size_names_its_unit():
    measured = re.compile(
        r"(optim\.(lr|momentum|weight_decay)|lr_schedule\.(end|factor|power|warmup_steps)|norm\.momentum|window\.size|"
        r"data\.(scale|base_size|crop_size|resize|flip|crops_per_minibatch)|trainer\.(ema_decay|evaluate_batch_size)|"
        r"batch_size|head\.auxiliary_weight)=(\{|\\)"
    )
    rates = [
        (word, entry)
        for word, entry in ENTRIES
        if not re.match(r"slip|alone|data\.", word) and measured.match(entry.give)
    ]
    assert len(rates) > 20 and [word for word, entry in rates if not entry.unit] == []
