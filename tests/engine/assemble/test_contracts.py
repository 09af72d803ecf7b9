"""Each choice builds something that its group's contract can call; otherwise an error names the choice."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from datasets import ClassificationDataset, SegmentationDataset
from datasets.row import Row
from engine.assemble import network
from engine.assemble.contracts import builder, imported, takes_argument
from engine.assemble.network import norm_act
from engine.schema import network as schema
from engine.schema.classification import ClassificationRun
from engine.schema.keys import CHOICES, choice, groups_of, key
from engine.schema.network import Head, Norm
from engine.schema.optim import Optim
from engine.schema.segmentation import Loss, SegmentationRun
from keepless import ABN
from models.bodies import Body
from tests.choices import forgotten
from tests.engine.test_every_key import small_choice
from tests.runs import run_config


@dataclass
class GroupNorm(Norm):
    name: str = "in_groups"
    builds: ClassVar[str] = f"{__name__}.Groups"


class Groups(nn.Module):
    def __init__(self, channels: int, activation: str, momentum: float):
        super().__init__()
        self.momentum = momentum


class Rectified(nn.Module):
    def __init__(self, channels: int, activation: str, momentum: float):
        super().__init__()
        self.activation = {"relu": nn.ReLU()}[activation]


def test_a_norm_that_refuses_an_activation_is_named():
    """A body asks for norms without activation, too."""

    @dataclass
    class Refusing(Norm):
        name: str = "refusing"
        activation: str | None = "relu"
        builds: ClassVar[type] = Rectified

    assert isinstance(norm_act(Refusing())(4).activation, nn.ReLU)
    message = "^norm=refusing of 4 channels, activation=identity: KeyError: 'identity'$"
    with pytest.raises(ValueError, match=message):
        norm_act(Refusing())(4, activation="identity")


def of_three(norm_act, classes, output_stride):
    """A body that takes no other number of channels."""
    return Body()


def test_a_body_of_three_channels_alone_is_refused_by_name_for_others():
    @dataclass
    class OfThree(schema.Body):
        name: str = "of_three"
        builds: ClassVar[str] = f"{__name__}.of_three"

    assert isinstance(network.body(OfThree(), ABN), Body)
    message = r"^body=of_three builds .*of_three, which must take \(norm_act, .*in_channels=\): got an unexpected"
    with pytest.raises(ValueError, match=message):
        network.body(OfThree(), ABN, channels=4)


@pytest.mark.parametrize("name", CHOICES["data"])
def test_a_dataset_names_its_row_and_belongs_to_one_task(name):
    kind = CHOICES["data"][name]
    row = imported("data", kind)
    assert isinstance(row, Row)
    builder("data", small_choice("data", name, kind, {}))
    tasks = [run for run in (SegmentationRun, ClassificationRun) if name in groups_of(run)["data"]]
    made_of = ClassificationDataset if tasks[0] is ClassificationRun else SegmentationDataset
    assert len(tasks) == 1 and row.make.__annotations__["return"] in (made_of, made_of.__name__)


@pytest.fixture
def registry():
    """Choices that a test registers are forgotten after it."""
    with forgotten():
        yield


def narrow(ignore_index, weights=None):
    raise AssertionError("it must not be called")


@pytest.mark.parametrize(
    "builds, problem",
    [
        (f"{__name__}.narrow", "which must take (ignore_index, weights=, stride=, share=): got an unexpected keyword"),
        (f"{__name__}.missing", "which cannot be imported: module"),
        ("no_such_module.Loss", "which cannot be imported: No module named 'no_such_module'"),
    ],
)
def test_a_choice_that_breaks_its_contract_is_refused_by_name(builds, problem, registry):
    @choice("loss")
    class Broken(Loss):
        name: str = "broken"
        share: float = key(0.5, above=0)
        builds: ClassVar[str] = "module.Name"

    Broken.builds = builds
    with pytest.raises(ValueError) as error:
        builder("loss", Broken())
    assert str(error.value).startswith(f"loss=broken builds {builds}, {problem}")


def focal(ignore_index, weights, stride, gamma):
    raise AssertionError("it must not be called")


def test_a_key_without_a_type_is_named_where_its_argument_is_missing(registry):
    @choice("loss")
    class Untyped(Loss):
        name: str = "untyped"
        gamma = 2.0
        builds: ClassVar[str] = f"{__name__}.focal"

    with pytest.raises(ValueError, match=r"Untyped.gamma has no type, so it is no key: write gamma: float = 2.0"):
        builder("loss", Untyped())


def test_a_norm_without_running_statistics_has_no_momentum(registry):
    """It is called with the usual one, as every norm; a key that it would ignore does not exist."""
    choice("norm")(GroupNorm)
    assert norm_act(run_config("norm=in_groups").norm)(4).momentum == 0.1
    with pytest.raises(ValueError, match="norm.momentum is for norm=std and .*; another norm is chosen"):
        run_config("norm=in_groups", "norm.momentum=0.5")
    assert norm_act(run_config("norm=std", "norm.momentum=0.5").norm)(4).momentum == 0.5


class Sgd(torch.optim.SGD):
    def __init__(self, params, lr, nesterov):
        super().__init__(params, lr, momentum=0.5, nesterov=nesterov)


def test_builds_may_be_the_class_itself_and_optimisers_take_what_they_know(registry):
    @choice("optim")
    class Own(Optim):
        name: str = "own"
        lr: float = 0.1
        nesterov: bool = True
        builds: ClassVar[type] = Sgd

    build = builder("optim", Own())
    assert imported("optim", Own) is Sgd and takes_argument(Sgd, "lr") and not takes_argument(Sgd, "fused")
    assert build([nn.Parameter(torch.zeros(2))], lr=0.1).defaults["nesterov"]
    Own.builds = nn.Linear
    with pytest.raises(
        ValueError, match=r"^optim=own builds torch.nn.modules.linear.Linear, which must take \(params, n"
    ):
        builder("optim", Own())


def test_a_key_that_would_hide_an_argument_is_refused_by_name(registry):
    """It was left out without a word."""
    message = "^loss=narrow: its key stride has the name of an argument that every loss is given: rename it, or declare"
    with pytest.raises(ValueError, match=message):

        @choice("loss")
        class Hides(Loss):
            name: str = "narrow"
            stride: int = 2
            builds: ClassVar[str] = "mine.Narrow"

    assert "narrow" not in CHOICES["loss"]


def test_a_class_that_is_no_choice_is_refused(registry):
    with pytest.raises(ValueError, match=r'head=mine: BuildsNothing needs builds: ClassVar\[str\] = "module.Name"'):

        @choice("head")
        class BuildsNothing(Head):
            name: str = "mine"

    with pytest.raises(ValueError, match='Nameless: give it a name, such as name: str = "mine"'):

        @choice("head")
        class Nameless(Head):
            builds: ClassVar[str] = "mine.Head"
