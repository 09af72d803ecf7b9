"""Layers keep and recompute what the slides say; docs/memory.md shows it (tests/test_docs.py)."""

import pytest
from torch import nn

from models.bodies import resnext101
from models.pooling import MaxPool2d
from scripts.evidence import documents, strategy_table
from scripts.evidence.strategy_table import RECOMPUTED_NORMS, STRATEGIES, cost, measure
from tests.bodies import small_resnext

# The slides' "Strategies Comparisons"; they misprint x for x_hat in the proposed checkpointing (section 3.2).
SLIDES = {
    "std": (["x", "z"], ["mean", "sigma"], []),
    "checkpoint": (["x"], ["mean", "sigma"], ["BN", "phi"]),
    "checkpoint_xhat": (["x_hat"], ["sigma"], ["pi", "phi"]),
    "inplace_1": (["z"], ["sigma"], ["phi^-1", "pi^-1"]),
    "inplace": (["z"], ["sigma"], ["phi^-1"]),
}


def test_every_strategy_keeps_and_recomputes_what_the_slides_say():
    rows = [measure(norm) for norm in STRATEGIES]
    assert {row.norm: (row.buffers, row.statistics, sorted(row.recomputed)) for row in rows} == {
        norm: (buffers, statistics, sorted(recomputed)) for norm, (buffers, statistics, recomputed) in SLIDES.items()
    }
    standard = rows[0].activation_bytes
    assert [row.activation_bytes / standard for row in rows] == [1, 0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    "body, expected",
    [("ResNeXt-101", 1.98)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("ResNet-101", 1.21), ("WideResNet-38", 1.89), ("DenseNet-264", 1.99))
    ],
)
def test_every_saving_strategy_keeps_the_same_share_of_a_whole_network(body, expected):
    kept = documents.kept(body)
    assert kept.keys() == STRATEGIES.keys()
    for norm in STRATEGIES.keys() - {"std"}:
        assert abs(kept["std"] / kept[norm] - expected) < 0.005


@pytest.mark.slow
@pytest.mark.parametrize("body, expected", [("ResNeXt-101", 1.96), ("WideResNet-38", 1.75)])
def test_with_pytorchs_pooling_the_share_is_the_one_measured_with_the_released_layers(body, expected, monkeypatch):
    monkeypatch.setattr(MaxPool2d, "forward", nn.MaxPool2d.forward)
    standard, inplace = (strategy_table.bytes_per_pixel(norm, body) for norm in ("std", "inplace"))
    assert abs(standard / inplace - expected) < 0.005


@pytest.mark.parametrize(
    "body, size, bytes_per_pixel",
    [(small_resnext, 64, None), pytest.param(resnext101, 512, 9253, marks=pytest.mark.slow)],
)
def test_standard_norms_that_compute_activations_again_keep_what_in_place_norms_keep(body, size, bytes_per_pixel):
    """By default nothing is computed again; blocks keep less for more operations, and sqrt less still."""
    standard, inplace = (RECOMPUTED_NORMS[norm] for norm in ("std", "inplace"))
    stored, activations, blocks, sqrt = (
        cost(body, standard, choice, size) for choice in ("none", "activations", "blocks", "sqrt")
    )
    assert bytes_per_pixel in (None, stored.kept)
    assert activations.kept <= 1.02 * cost(body, inplace, "none", size).kept
    assert stored.kept > blocks.kept > sqrt.kept and all(each.peak >= each.kept for each in (stored, blocks, sqrt))
    assert stored.operations == activations.operations < blocks.operations < sqrt.operations
