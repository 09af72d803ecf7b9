"""The words of other programs in words.yaml: each entry is reached, and what it gives can be given."""

import functools
import sys

import pytest

from engine.configuration.choices import choices, groups_in
from engine.configuration.words import ALONE, entries, keys_of, meant
from engine.schema.classification import ClassificationRun
from engine.schema.evaluation import Evaluation, Prediction
from engine.schema.keys import declared_in
from engine.schema.segmentation import SegmentationRun
from scripts.browse_data import BrowseData
from scripts.export import Export
from scripts.verify_data import VerifyData

COMMANDS = {
    "train_seg": SegmentationRun,
    "train_imagenet": ClassificationRun,
    "eval": Evaluation,
    "predict": Prediction,
    "export": Export,
    "browse_data": BrowseData,
    "verify_data": VerifyData,
    "plan_memory": SegmentationRun,
}
VALUES = (
    "anything true false 0 4 0.9 16 bf16 32 gpu imagenet a.pt a/b.pt x.yaml configs/experiment/x.yaml a.jpg RUN "
    "RUN/checkpoints/last.pt [512,1024] 512x1024 checkpointing adam momentum MultiStepLR PolyLR CosineAnnealingLR "
    "LinearLR VOC2012 BN SyncBN iABN LeakyReLU none CrossEntropyLoss OHEM timm/resnet50 torchvision.resnet50 8"
).split()


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str, str], tuple[str | None, str]]:
    """{(command, word, value): the advice}, of every word in words.yaml."""
    found, program = {}, sys.argv[0]
    for command, schema in COMMANDS.items():
        sys.argv[0] = f"{command}.py"
        keys = {*declared_in(schema), *groups_in(command.replace("plan_memory", "train_seg"))}
        for word in sorted({word for entry in entries() for word in entry.word}):
            for value in VALUES:
                if advice := meant(word, value, keys):
                    found[command, word, value] = advice
    sys.argv[0] = program
    return found


def test_every_word_is_answered(answers):
    answered = {word for _, word, _ in answers}
    assert [word for entry in entries() for word in entry.word if word not in answered] == []


def test_every_entry_is_reached(answers):
    """An entry that others above it hide is as good as none. A group's value may change what it gives."""
    texts = [f"{give or ''} {text}" for give, text in answers.values()]
    fixed = [(entry.give or entry.say).replace(r"\1", "{").partition("{")[0] for entry in entries()]
    assert [text for text in fixed if not any(text in answer for answer in texts)] == []


def test_keys_and_choices_that_are_advised_exist(answers):
    wrong = []
    declared = {command: declared_in(schema) for command, schema in COMMANDS.items()}
    choices_of, groups_of = functools.cache(choices), functools.cache(groups_in)
    for (command, word, value), (give, _) in answers.items():
        for key, _, given in (pair.partition("=") for pair in (give or "").split()):
            if given == value or key not in declared[command]:
                continue
            allowed = declared[command][key].metadata.get("one_of")
            if key in groups_of(command):
                allowed = choices_of(key, COMMANDS[command])
            if allowed is not None and given not in allowed:
                wrong.append(f"{command} {word}={value}: {give}")
    assert wrong == []


def test_right_values_of_our_keys_are_left_alone(answers):
    for command, schema in COMMANDS.items():
        keys = {*declared_in(schema)}
        for key, declared in declared_in(schema).items():
            for value in declared.metadata.get("one_of") or ():
                assert meant(key, str(value), keys) is None, f"{command} {key}={value}"
        for group in groups_in(command):
            for choice in choices(group, schema):
                assert meant(group, choice, keys) is None, f"{command} {group}={choice}"


def test_keys_of_several_words():
    assert keys_of("data.crop_size=512 data.crop_aspect=2") == {"data.crop_size", "data.crop_aspect"}
    assert meant(ALONE, "last.pt", {"checkpoint"}) == ("checkpoint=last.pt", "give checkpoint=last.pt")
