"""The benchmark of known networks: what it counts, and how it resumes. No test asserts a time."""

import json
import re

import pytest
import torch
from torch import nn
from torchvision.models import resnet

from engine.configuration.command_line import composed
from keepless.saved import kept_bytes
from scripts.evidence import frame, methods, networks
from scripts.evidence.methods import BLOCKS, BUDGET, COMPILED, NETWORKS, PLAIN, RECOMPUTED, blocks_of, build, installed
from tests.scripts.evidence.records import alone, measured

SMALL, SEGMENTATION = "squeezenet1_1", "lraspp_mobilenet_v3_large"
FAILS = "maxvit_t"  # its windows do not fit into small images


class Segments(nn.Sequential):
    """Returns logits in a dictionary, as torchvision's segmentation networks do, from a hundredth of their weights."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 16, 3), *(resnet.BasicBlock(16, 16) for _ in range(2)), nn.Conv2d(16, 5, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": super().forward(x)}


def test_every_method_is_measured_beside_the_plain_network(monkeypatch, tmp_path):
    """A whole run on two networks that work and one that does not, with a compiler that takes no time."""
    monkeypatch.setattr(methods, "WITH_COMPILER", (SMALL,))
    monkeypatch.setattr(methods, "build", lambda name, size: Segments() if name == SEGMENTATION else build(name, size))
    monkeypatch.setattr(methods, "alone", alone)
    only = f"only=[{SMALL},{FAILS},{SEGMENTATION}]"
    options = ["rounds=2", "images=2", "image_size=64", "compiler=aot_eager", only]
    result, text = measured("networks", networks.run, tmp_path, *options)
    rows = {(row["network"], row["method"]): row for row in result["rows"]}
    assert list(rows) == [
        *((SMALL, method) for method in (PLAIN, RECOMPUTED, BLOCKS, COMPILED, BUDGET)),
        *((SEGMENTATION, method) for method in (PLAIN, RECOMPUTED, BLOCKS)),
    ]
    assert all(len(row["times_ms"]) == 2 and row["peak_bytes"] > row["kept_bytes"] > 0 for row in rows.values())
    for (name, method), row in rows.items():
        if method in (RECOMPUTED, BLOCKS):
            assert row["deviation"] <= 1e-12 and row["same_outputs"]
            assert row["kept_bytes"] < 0.9 * rows[name, PLAIN]["kept_bytes"]
        if method == PLAIN:
            assert f"| {name} | plain | {row['kept_bytes'] / 2**20:.1f} | 1 |" in text
    (entry,) = result["left_out"]
    assert (entry["network"], entry["method"]) == (FAILS, "all methods")
    assert f"- {FAILS}, all methods: failed: " in text and only in text and "![memory against time" in text
    assert "| recompute_activations | 2 |" in text and "| compiled | 1 |" in text
    assert re.search(
        r"- \*recompute_activations\* beside \*checkpoint per block\*: faster in . of 2 networks, keeps", text
    )


@pytest.mark.slow
def test_a_network_is_measured_in_a_process_of_its_own(tmp_path):
    options = ["rounds=1", "images=2", f"only=[{SMALL}]", "image_size=40"]
    result, _ = measured("networks", networks.run, tmp_path, *options)
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == [PLAIN, RECOMPUTED, BLOCKS] and rows[RECOMPUTED]["deviation"] <= 1e-12


class BasicBlock(nn.Module):
    """A block by its name. It takes a list, as DenseNet's layers do."""

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return sum(inputs).sigmoid().sigmoid()


def test_checkpointed_blocks_keep_their_inputs_once():
    class Dense(nn.ModuleList):
        def forward(self, x):
            features = [x * 1]
            for block in self:
                features.append(block(list(features)))
            return features[-1]

    x = torch.randn(1000, requires_grad=True)
    plain, network = (Dense(BasicBlock() for _ in range(3)) for _ in range(2))
    assert len(blocks_of(network)) == 3
    assert kept_bytes(plain, lambda: plain(x), [x]) == 3 * 2 * x.nbytes
    forward = methods.forward_of(network, BLOCKS)
    assert kept_bytes(network, lambda: forward(x), [x]) == 3 * x.nbytes
    torch.testing.assert_close(forward(x), plain(x), rtol=0, atol=0)


def test_there_are_enough_networks_and_their_blocks_are_known():
    ours = [name for name in NETWORKS if installed(name)]
    assert len([name for name in NETWORKS if "/" not in name]) >= 25
    for name in ours:
        if name.startswith("regnet_x"):  # like regnet_y
            continue
        with torch.device("cpu" if name.startswith("regnet") else "meta"):
            network = build(name, 224)
        assert (len(blocks_of(network)) >= 8) == (name not in ("alexnet", "vgg16_bn", "frozen/convolutions")), name


def faked(monkeypatch, stop_at: str | None = None, fail_at: str | None = None) -> list[str]:
    """Measure nothing; returns a list to which the name of each network is added when its turn comes."""
    names = []

    def row(name: str, method: str) -> dict:
        exact = {"deviation": 0.0, "same_outputs": True} if method == RECOMPUTED else {}
        return {"network": name, "method": method, "kept_bytes": 8, "peak_bytes": 9, **exact, "times_ms": [1.0, 1.0]}

    def measured(_: object, name: str, *__: object) -> tuple[list[dict], list[dict]]:
        if name == stop_at:
            raise KeyboardInterrupt
        names.append(name)
        if name == fail_at:
            raise RuntimeError("out of memory")
        return [row(name, PLAIN), row(name, RECOMPUTED)], [{"network": name, "method": BLOCKS, "reason": "because"}]

    monkeypatch.setattr(methods, "alone", measured)
    return names


def test_a_stopped_run_goes_on_with_the_missing_networks(monkeypatch, tmp_path):
    """And another choice of networks is added to the record, in the order of all networks."""
    out = tmp_path / "record.json"
    values = composed("networks", f"out={out}", "only=[resnet18,alexnet,vgg16_bn,densenet121]")
    names = faked(monkeypatch, stop_at="densenet121", fail_at="vgg16_bn")
    with pytest.raises(KeyboardInterrupt):
        networks.run(values)
    assert names == ["alexnet", "vgg16_bn", "resnet18"]
    stopped = json.loads(out.read_text())
    assert {row["network"] for row in stopped["rows"]} == {"alexnet", "resnet18"}
    names = faked(monkeypatch)
    page = networks.run(values)
    assert names == ["vgg16_bn", "densenet121"]  # a failed one is tried again
    result = json.loads(out.read_text())
    assert len(result["rows"]) == 8 and len(result["left_out"]) == 4 and result["seconds"] >= stopped["seconds"]
    assert f"densenet121, {BLOCKS}: because" in page.read_text()
    names = faked(monkeypatch)
    networks.run(values)
    assert names == [] and json.loads(out.read_text())["rows"] == result["rows"]
    page = networks.run(composed("networks", f"out={out}", "only=[resnet18,squeezenet1_1]"))
    order = list(dict.fromkeys(row["network"] for row in json.loads(out.read_text())["rows"]))
    assert names == ["squeezenet1_1"] and order == ["alexnet", "vgg16_bn", *names, "resnet18", "densenet121"]
    assert f"python -m scripts.evidence.networks only=[{','.join(order)}] out=FILE.json\n" in page.read_text()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_a_record_of_another_call_is_not_overwritten(monkeypatch, tmp_path):
    faked(monkeypatch)
    out = f"out={tmp_path / 'record.json'}"
    networks.run(composed("networks", out, "only=[alexnet]"))
    before = (tmp_path / "record.json").read_text()
    with pytest.raises(ValueError, match=r"another call \(images=8\)"):
        networks.run(composed("networks", out, "images=4"))
    now = frame.provenance(methods.PACKAGES.values())
    for changed, message in (
        ({"hardware": "another"}, r"\(hardware="),
        ({"versions": {**now["versions"], "torch": "3.0"}}, rf"\(torch={re.escape(torch.__version__.split('+')[0])}"),
    ):
        monkeypatch.setattr(frame, "provenance", lambda *_, changed=changed: now | changed)
        with pytest.raises(ValueError, match=f"another call {message}"):
            networks.run(composed("networks", out, "only=[alexnet]"))
    assert (tmp_path / "record.json").read_text() == before
    monkeypatch.setattr(frame, "provenance", lambda *_: now | {"commit": "another"})
    for only in ("alexnet", "alexnet,resnet18"):  # another commit counts if it measures something
        networks.run(composed("networks", out, f"only=[{only}]"))
        commits = json.loads((tmp_path / "record.json").read_text())["environment"]["commit"]
        expected = [json.loads(before)["environment"]["commit"], *["another"] * ("resnet18" in only)]
        assert commits.split(", ") == expected


OPTIONAL = ("timm", "smp", "transformers", "diffusers", "nnunet")


def test_packages_that_are_not_installed_are_named(monkeypatch, tmp_path):
    names = faked(monkeypatch)
    monkeypatch.setattr(methods, "PACKAGES", methods.PACKAGES | {name: f"no_{name}" for name in OPTIONAL})
    with pytest.raises(ValueError, match=r"only=timm/densenet121: no_timm is not installed: pip install"):
        networks.run(composed("networks", f"out={tmp_path / 'a.json'}", "only=[timm/densenet121]"))
    text = networks.run(composed("networks", f"out={tmp_path / 'b.json'}")).read_text()
    assert names == [name for name in NETWORKS if name.partition("/")[0] not in OPTIONAL]
    assert "- timm/densenet121, all methods: no_timm is not installed" in text
