"""The benchmark of reversible networks: what it counts. No test asserts a time."""

import json
import math
from functools import partial

import pytest
import torch

from datasets import cifar10
from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.configuration.config import plain
from keepless import InPlaceABN
from models import bodies
from scripts.evidence import reconstruction_error, reversible, reversible_costs
from scripts.evidence.reversible_costs import PUBLISHED, activations, angle, bytes_per_pixel, variants
from tests.bodies import SMALL_BODIES, small_revnet
from tests.datasets.classification_trees import cifar10_python
from tests.runs import REPOSITORY, classification_config
from tests.scripts.evidence.records import measured

RECORD = REPOSITORY / "docs" / "results" / "reversible.json"
SMALL = SMALL_BODIES["revnet-7x7"]
IN_PLACE = "RevNet-104, inplace, reversible"
CASES = ("ResNeXt-101, std, stored", f"{IN_PLACE}, float32", f"{IN_PLACE}, bfloat16")


@pytest.mark.slow
def test_table_1_counts_what_theory_says_and_the_page_shows_it(monkeypatch, tmp_path):
    """A whole run on tiny networks."""
    monkeypatch.setattr(reversible_costs, "DEPTHS", (2, 8))
    monkeypatch.setitem(reversible_costs.NORMS, "inplace", partial(InPlaceABN, backend="eager"))
    monkeypatch.setattr(reversible_costs, "revnet104", SMALL)
    monkeypatch.setattr(reversible_costs, "revnet38_cifar", partial(small_revnet, structure=(4, 4, 4)))
    monkeypatch.setattr(
        reversible_costs, "segmentation", lambda: [{"case": case, "bytes_per_pixel": 10} for case in CASES]
    )
    options = ["rounds=1", "images=2", "crop_size=32", "parts=[steps,depths,segmentation]"]
    result, text = measured("reversible", reversible.run, tmp_path, *options)

    rows = {(row["units"], row["method"]): row for row in result["depths"]}
    state = 4 * 32 * 16 * 16 * 4  # bytes of a unit's output
    assert rows[8, "reversible"]["kept_bytes"] == rows[2, "reversible"]["kept_bytes"] == state
    assert rows[8, "blocks"]["kept_bytes"] == 8 * state
    assert rows[8, "sqrt"]["kept_bytes"] == 3 * state  # segments of 3, 3 and 2 units
    assert rows[8, "recursive"]["kept_bytes"] == 2 * state
    assert rows[8, "naive"]["kept_bytes"] > 12 * state
    naive = rows[8, "naive"]["flops"]
    assert rows[8, "reversible"]["flops"] == pytest.approx(4 / 3 * naive)
    assert rows[8, "recursive"]["flops"] > rows[8, "sqrt"]["flops"] > rows[8, "blocks"]["flops"] > naive
    for units in (2, 8):
        peaks = {method: rows[units, method]["peak_bytes"] for method in reversible_costs.METHODS}
        assert min(peaks, key=lambda method: peaks[method]) == "reversible"

    variants = {*reversible_costs.VARIANTS, reversible_costs.FORWARD}
    assert {row["variant"] for row in result["steps"]} == variants and len(result["steps"]) == 8 * len(variants)
    flops = {row["variant"]: row["flops"] for row in result["steps"]}
    assert flops[reversible_costs.FORWARD] < flops["stored"] < flops["once"] < flops["twice"]
    assert "RevNet-104, inplace, reversible, bfloat16" in text


SOME = ("ResNet-32", "RevNet-38")


@pytest.mark.parametrize(
    "networks", [SOME, pytest.param(tuple(PUBLISHED), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_kept_bytes_are_those_of_the_record(networks, monkeypatch):
    """MemCNN's published table and the segmentation network; counted again from the code as it is."""
    recorded = json.loads(RECORD.read_text())
    monkeypatch.setattr(reversible_costs, "PUBLISHED", networks)
    assert activations() == [row for row in recorded["activations"] if row["network"] in networks]
    for dtype, expected in (("float32", 900), ("bfloat16", 756)):
        row = bytes_per_pixel("RevNet-104", bodies.revnet104, "inplace", dtype, True)
        assert row in recorded["segmentation"] and row["bytes_per_pixel"] == expected


def test_the_three_variants_have_the_same_gradients():
    torch.manual_seed(0)
    network = SMALL(classes=3).double()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    gradients = []
    for variant in variants(network).values():
        variant(images).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in variant.parameters()]))
        torch.testing.assert_close(gradients[-1], gradients[0], rtol=0, atol=1e-9 * gradients[0].abs().max().item())


def test_small_angles_are_exact():
    for degrees in (0.0, 1e-6, 1.0, 90.0, 179.0):
        radians = math.radians(degrees)
        other = 3 * torch.tensor([math.cos(radians), math.sin(radians)], dtype=torch.float64)
        assert angle(other, torch.tensor([1.0, 0.0])) == pytest.approx(degrees, rel=1e-6, abs=1e-12)


@pytest.mark.slow
def test_restored_gradients_are_measured_at_the_checkpoints_of_a_run(tmp_path):
    """In the order of steps, to the end; a network without reversible blocks is refused."""
    cifar10_python(tmp_path / "cifar")
    (tmp_path / "kept").mkdir()
    options = [f"root={tmp_path / 'cifar'}", f"checkpoints={tmp_path / 'kept'}", "precisions=[float32]"]

    def keep(name: str, step: int, experiment: str) -> None:
        overrides = ("data.crops_per_minibatch=4", f"data.root={tmp_path / 'cifar'}")
        config = classification_config(f"experiment=revnet/{experiment}", *overrides)
        network = assemble.classification_network(config, 10)
        state = {"task": "classification", "step": step, "total_steps": 7, "config": plain(config)}
        classes = list(cifar10(tmp_path / "cifar", "train").classes)
        checkpoint.save(tmp_path / "kept" / name, {**state, "classes": classes, "network": network.state_dict()})

    keep("a.pt", 7, "cifar10_revnet38")
    keep("b.pt", 0, "cifar10_revnet38")
    result, text = measured("reconstruction_error", reconstruction_error.run, tmp_path, *options)
    assert [row["step"] for row in result["rows"]] == [0, 7] and 0 < result["rows"][0]["angle"] < 1
    assert "at 2 steps of a training of 80,000 in float32" in text and "checkpoints=FOLDER" in text
    for name, step, message in (
        ("c.pt", 3, "c.pt is of another training than .*b.pt"),
        ("b.pt", 0, "b.pt .* without reversible blocks"),
    ):
        keep(name, step, "cifar10_resnet32")
        with pytest.raises(ValueError, match=message):
            measured("reconstruction_error", reconstruction_error.run, tmp_path, *options)
