"""Layers keep and recompute what the slides say; docs/memory.md shows it (tests/test_docs.py)."""

import pytest

from models.bodies import resnext101
from scripts.evidence import documents
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
    [("ResNeXt-101", 1.96)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("ResNet-101", 1.21), ("WideResNet-38", 1.75), ("DenseNet-264", 1.98))
    ],
)
def test_every_saving_strategy_keeps_the_same_share_of_a_whole_network(body, expected):
    """As measured with the released layers: ResNeXt-101 keeps 1.96 times less, WideResNet-38 1.75 times less."""
    kept = documents.kept(body)
    assert kept.keys() == STRATEGIES.keys()
    for norm in STRATEGIES.keys() - {"std"}:
        assert abs(kept["std"] / kept[norm] - expected) < 0.005


@pytest.mark.parametrize(
    "body, size, bytes_per_pixel",
    [(small_resnext, 64, None), pytest.param(resnext101, 512, 9345, marks=pytest.mark.slow)],
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
