"""A report lists what is kept, by which module for which function, and why."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from keepless import recompute_activations, report
from tests.keepless.recompute.ahead import After


class Parts(nn.Sequential):
    """A linear layer saves an input of three dimensions as a view; activations save their results; pooling, signs."""

    def __init__(self) -> None:
        gated = After(nn.Identity(), lambda x: F.silu(x) * 2)  # has no parameters, and calls functions itself
        layers = [nn.LayerNorm(64), nn.Linear(64, 64), nn.Sequential(gated, nn.Identity()), nn.Linear(64, 64)]
        layers += [nn.Tanh(), drop := nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.AvgPool2d((1, 2)), drop]
        super().__init__(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1).exp()


X = torch.linspace(-1, 1, 4 * 32 * 64).sin().view(4, 32, 64)
TEXTS = {
    None: """
bytes    tensors  made by  kept for        module  why
49,152   2        input    dropout         5       made without a gradient
32,768   1        input    layer_norm      0       made without a gradient
32,768   1        Tanh     tanh            4       its input is not kept
32,768   1        Addmm    silu            2.0     only a budget repeats it
16,384   1        Softmax  softmax                 only a budget repeats it
1,024    1        Relu     signs for relu  7       its input is not kept
164,864           total""",
    "1GiB": """
bytes    tensors  made by          kept for        module  why
49,152   2        input            dropout         5       cannot be computed again
32,768   1        input            layer_norm      0       cannot be computed again
32,768   1        View             silu            2.0     planned
32,768   1        Tanh             tanh            4       planned
32,768   1        NativeLayerNorm  linear          1       planned
32,768   1        Mul              linear          6       planned
32,768   1        Mul              linear          3       planned
16,384   1        Softmax          softmax                 planned
16,384   1        Exp              exp                     planned
1,024    1        Relu             signs for relu  7       planned
279,552           total""",
}


@pytest.mark.parametrize("budget", TEXTS)
def test_a_report_says_what_is_kept_for_what_and_why(budget):
    """Another budget would compute again what is planned."""
    network = recompute_activations(Parts(), budget=budget)
    with pytest.raises(ValueError, match="nothing to report"):
        report(network)
    for number in range(4):  # also in passes that have advice
        network(X).sum().backward()
        if budget is not None and number == 0:  # it is watched
            continue
        assert str(report(network)) == repr(report(network)) == TEXTS[budget][1:]  # repr: in a notebook


def _repeated(x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = x.exp()
    return x


# What has made a kept tensor, and why it is kept. `exp` saves its result, unlike `sin`, which saves its argument.
REASONS = [
    ("PixelShuffle", "its input is not kept", lambda x: F.pixel_shuffle(F.conv2d(x, x.new_ones(4, 4, 1, 1)), 2).sin()),
    ("Exp", "12 recipes in a row", lambda x: _repeated(x, 14)),
    ("Mean", "over 16 times smaller than what it is computed from", lambda x: x.exp().mean((2, 3), keepdim=True).sin()),
    ("Elu", "an option is a tensor", lambda x: F.elu(x, torch.ones(())).sin()),
    ("Cumsum", "no rule repeats it", lambda x: x.cumsum(0).sin()),
    # A view that cannot be made again.
    ("Conj", "no rule repeats it", lambda x: (torch.complex(x, x).conj() * torch.complex(x, -x)).abs()),
    ("TwoTensor", "a subclass of tensors", lambda x: F.silu(TwoTensor(x, x))),
]


@pytest.mark.parametrize("made_by, why, function", REASONS)
def test_a_report_names_the_rule_that_keeps_a_tensor(made_by, why, function):
    network = recompute_activations(After(nn.Identity(), function))
    for _ in range(2):  # also in passes that have advice
        network((torch.randn(4, 4, 8, 8, requires_grad=True) * 1).sin()).sum().backward()
        assert (made_by, why) in {(line.made_by, line.why) for line in report(network).lines}
