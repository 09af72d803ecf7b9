"""The configuration of a released file: its network computes what the file's description says."""

import pytest
import torch

from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.prediction.authors_networks import of_released
from keepless import ABN, InPlaceABN
from models.checkpoints.released import weights_in
from tests import released_files as files
from tests.released_files import IMAGES, Released

# Scales are converted tensor by tensor, whatever the network.
KINDS = {
    "resnext": (Released.resnext, {}, "3x3", "released"),
    "resnet basic": (Released.resnet, dict(base=(4, 4)), "7x7", "raw"),
    "wider": (Released.wider, files.WIDER, None, "released"),
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_classifier_from_its_file_alone(tmp_path, kind):
    describe, options, stem, scale = KINDS[kind]
    norm, layer = ("std", ABN) if scale == "raw" else ("inplace", InPlaceABN)
    released = Released(plain=scale == "raw")
    expected = released.classified(describe(released, IMAGES, **options), 3)
    path = files.write_classifier(tmp_path / "net.pth.tar", released.tensors)
    config, state, _ = of_released(weights_in(torch.load(path), path, "it", scale), "it")
    assert (state["step"], state["classes"], getattr(config.body, "stem", None)) == (0, ["0", "1", "2"], stem)
    assert state["unnamed_classes"]
    assert (config.norm.name, config.norm.activation, config.norm.activation_param) == (norm, "leaky_relu", 0.01)
    assert (config.data.name, config.body.output_stride) == ("imagenet", 32)
    assert (config.data.mean, config.data.std) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])

    names = ("cat", "dog", "owl")
    network = checkpoint.load_network(lambda: assemble.network_of(config, 3), state, names, path)
    assert {type(module) for module in network.modules() if isinstance(module, ABN)} == {layer}
    network = network.double().eval()
    network.load_state_dict({name: tensor.double() for name, tensor in state["network"].items()})
    torch.testing.assert_close(network(IMAGES), expected, rtol=1e-4, atol=1e-4)  # stored in float32


def test_the_segmentation_network_has_the_release_s_options(tmp_path):
    path, _ = files.small_vistas(tmp_path / "vistas.pth.tar", dtype=torch.float32)
    config, state, _ = of_released(weights_in(torch.load(path), path, "it", "released"), "it")
    assert (config.body.output_stride, config.body.downsampling, config.head.pooling_size) == (8, "stride", [84, 84])
    data = config.data
    assert (data.name, data.base_size, data.antialias) == ("vistas", 2048, True)
    assert data.mean == [0.41738699, 0.45732192, 0.46886091] and data.std == [0.25685097, 0.26509955, 0.29067996]
    assert config.head.dilations == [12, 24, 36]
    assert (config.norm.name, config.norm.activation_param) == ("inplace", 0.01)
    assert len(set(state["palette"])) == 65
