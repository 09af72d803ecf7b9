"""Every strategy against PyTorch's batch normalisation, activation and autograd."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.layers import ABN, CheckpointedABN, InPlaceABN
from models.layers import abn as abn_module
from models.layers.bn_act import Strategy, floored

CHANNELS = 6
ACTIVATIONS = {"leaky_relu": 0.01, "elu": 1.0, "identity": 0.0, "sigmoid": 0.0, "tanh": 0.0}


def activate(name: str, param: float, y: torch.Tensor) -> torch.Tensor:
    if name == "leaky_relu":
        return F.leaky_relu(y, param)
    if name == "elu":
        return F.elu(y, param)
    return {"identity": torch.clone, "relu": F.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}[name](y)


def randomise(layer: ABN) -> ABN:
    """Scales of both signs with |gamma| in 0.5 … 1.5, shifts within 0.5."""
    torch.manual_seed(1)
    with torch.no_grad():
        if layer.weight is not None:
            signs = torch.tensor([1.0, -1.0] * CHANNELS)[:CHANNELS]
            layer.weight.copy_((0.5 + torch.rand(CHANNELS)) * signs)
        if layer.bias is not None:
            layer.bias.copy_(torch.rand(CHANNELS) - 0.5)
        if layer.running_var is not None:
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2.0)
    return layer.double()


def reference(layer: ABN, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Batch normalisation written out, for autograd to differentiate."""
    shape = (1, -1, *(1,) * (x.dim() - 2))
    others = [d for d in range(x.dim()) if d != 1]
    if layer.training or layer.running_mean is None:
        mean, var = x.mean(others), x.var(others, correction=0)
    else:
        mean, var = layer.running_mean, layer.running_var
    x_hat = (x - mean.view(shape)) / torch.sqrt(var.view(shape) + layer.eps)
    return activate(layer.activation, layer.activation_param, gamma.view(shape) * x_hat + beta.view(shape))


def layers():
    yield "std", ABN, {}
    for store in ("x", "x_hat"):
        yield f"checkpoint-{store}", CheckpointedABN, {"store": store}
    for variant in ("I", "II"):
        yield f"inplace-{variant}", InPlaceABN, {"variant": variant}
        yield f"inplace-{variant}-overwrite", InPlaceABN, {"variant": variant, "overwrite_input": True}


LAYERS = [pytest.param(cls, options, id=name) for name, cls, options in layers()]
SCALES = {
    "affine": {},
    "not-affine": {"affine": False},
    "scale-fixed": {"learn_scale": False},
    "batch-statistics-always": {"track_running_stats": False},
}


ACTIVATED_LAYERS = [
    pytest.param(cls, options, activation, id=f"{name}-{activation}")
    for name, cls, options in layers()
    for activation in [*ACTIVATIONS, *(["relu"] if cls is not InPlaceABN else [])]
]


@pytest.mark.parametrize("cls, options, activation", ACTIVATED_LAYERS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("scale", SCALES)
def test_equals_autograd_in_float64(cls, options, activation, training, scale):
    param = ACTIVATIONS.get(activation, 0.0)
    layer = randomise(cls(CHANNELS, activation=activation, activation_param=param, **SCALES[scale], **options))
    layer.train(training)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(4, CHANNELS, 5, 7, dtype=torch.float64).to(memory_format=memory_format).requires_grad_()
        parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]
        named = dict(zip([name for name, _ in layer.named_parameters()], parameters, strict=True))
        ones = torch.ones(CHANNELS, dtype=torch.float64)
        expected = reference(layer, x, named.get("weight", ones), named.get("bias", 0 * ones))
        dz = torch.randn_like(expected)
        expected_gradients = torch.autograd.grad(expected, [x, *parameters], dz)

        z = layer(x * 1)  # not x itself: a leaf must not be overwritten
        gradients = torch.autograd.grad(z, [x, *layer.parameters()], dz)
        torch.testing.assert_close(z, expected, rtol=0, atol=1e-10)
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-10)
        assert z.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("cls, options", LAYERS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_batchnorm2d(cls, options, momentum):
    layer, standard = cls(CHANNELS, momentum=momentum, **options), nn.BatchNorm2d(CHANNELS, momentum=momentum)
    for _ in range(3):
        x = torch.randn(2, CHANNELS, 4, 4) * 3 + 1
        standard(x)
        layer(x.clone())
    for name, buffer in standard.named_buffers():
        torch.testing.assert_close(getattr(layer, name), buffer)
    layer.load_state_dict(standard.state_dict())  # and the names are the same


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=5).filter(lambda s: torch.Size(s).numel() > s[1]),
    variant=st.sampled_from(["I", "II"]),
    gamma=st.floats(0.1, 3.0),
    negative=st.booleans(),
    beta=st.floats(-1.0, 1.0),
    slope=st.floats(0.01, 1.5),
)
def test_in_place_equals_standard_for_any_shape_and_scale(shape, variant, gamma, negative, beta, slope):
    standard = ABN(shape[1], activation_param=slope).double()
    inplace = InPlaceABN(shape[1], activation_param=slope, variant=variant).double()
    with torch.no_grad():
        standard.weight.fill_(-gamma if negative else gamma)
        standard.bias.fill_(beta)
    inplace.load_state_dict(standard.state_dict())
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    dz = torch.randn(shape, dtype=torch.float64)
    results = []
    for layer in (standard, inplace):
        z = layer(x)
        results.append((z, *torch.autograd.grad(z, [x, *layer.parameters()], dz)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def saved_storages(layer: nn.Module, x: torch.Tensor) -> dict[int, int]:
    """{address: bytes} of the storages that the layer keeps for its backward pass."""
    storages, kept = {}, []

    def pack(tensor):
        kept.append(tensor)
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        z = layer(x)
    return {**storages, "z": z.untyped_storage().data_ptr()}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("options", [{"variant": "I"}, {"variant": "II"}, {"overwrite_input": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_saves_its_output_and_three_vectors(activation, options, dtype):
    layer = InPlaceABN(64, activation=activation, activation_param=1.0, **options)
    source = torch.randn(2, 64, 8, 8, dtype=dtype, requires_grad=True)
    x = source * 1
    storages = saved_storages(layer, x)
    z = storages.pop("z")
    assert storages.pop(z) == x.numel() * x.element_size()
    assert sorted(storages.values()) == [64 * 4] * 3  # gamma, beta, 1 / sigma


def test_standard_saves_input_and_output():
    x = torch.randn(2, 64, 8, 8, requires_grad=True)
    storages = saved_storages(ABN(64), x)
    size = x.numel() * x.element_size()
    assert storages.pop(storages.pop("z")) == size
    assert storages.pop(x.untyped_storage().data_ptr()) == size
    assert all(nbytes <= 64 * 4 for nbytes in storages.values())


@pytest.mark.parametrize("variant", ["I", "II"])
def test_input_is_left_as_it_was(variant):
    x = torch.randn(2, CHANNELS, 4, 4)
    before = x.clone()
    z = InPlaceABN(CHANNELS, variant=variant)(x)
    assert torch.equal(x, before) and z.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_overwriting_writes_over_the_input():
    x = torch.randn(2, CHANNELS, 4, 4)
    z = InPlaceABN(CHANNELS, overwrite_input=True)(x)
    assert torch.equal(x, z) and z.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


class Allocations(TorchDispatchMode):
    """Counts new buffers of at least `nbytes` that operations return."""

    def __init__(self, nbytes: int):
        super().__init__()
        self.nbytes = nbytes
        self.kept, self.addresses = [], set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in filter(torch.is_tensor, tree_leaves((args, kwargs)))}
        results = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(results)):
            storage = tensor.untyped_storage()
            if storage.nbytes() >= self.nbytes and storage.data_ptr() not in given:
                self.kept.append(tensor)
                self.addresses.add(storage.data_ptr())
        return results


@pytest.mark.parametrize("overwrite_input, buffers", [(False, 1), (True, 0)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_overwriting_saves_the_one_buffer_of_the_forward_pass(overwrite_input, buffers, memory_format):
    layer = InPlaceABN(CHANNELS, overwrite_input=overwrite_input)
    x = torch.randn(4, CHANNELS, 8, 8).to(memory_format=memory_format)
    with Allocations(x.untyped_storage().nbytes()) as allocations:
        layer(x)
    assert len(allocations.addresses) == buffers


STRIDED = {
    "transposed": lambda: torch.randn(4, CHANNELS, 7, 5).transpose(2, 3) * 1,
    "channels sliced": lambda: torch.randn(4, 2 * CHANNELS, 5, 7)[:, :CHANNELS],
    "columns skipped": lambda: torch.randn(4, CHANNELS, 5, 14)[..., ::2],
    "channels last, cropped": lambda: torch.randn(4, CHANNELS, 9, 9).to(memory_format=torch.channels_last)[
        ..., 2:7, 1:8
    ],
    "matrix, transposed": lambda: torch.randn(CHANNELS, 40).t(),
    "volume, channels last": lambda: torch.randn(2, CHANNELS, 3, 4, 5).to(memory_format=torch.channels_last_3d),
}


@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("overwrite_input", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_every_memory_layout(layout, overwrite_input, training):
    torch.manual_seed(0)
    x = STRIDED[layout]().double()
    layer = randomise(InPlaceABN(CHANNELS, overwrite_input=overwrite_input)).train(training)
    source = x.clone().requires_grad_()
    expected = reference(layer, source, layer.weight, layer.bias)
    dz = torch.randn_like(expected)
    leaf = torch.zeros((), dtype=torch.float64, requires_grad=True)
    given = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x).add_(leaf)
    assert given.stride() == x.stride()
    z = layer(given)
    torch.testing.assert_close(z, expected, rtol=0, atol=1e-10)
    assert (z.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()) == overwrite_input
    (sum_of_dx,) = torch.autograd.grad(z, leaf, dz)
    (dx,) = torch.autograd.grad(expected, source, dz)
    torch.testing.assert_close(sum_of_dx, dx.sum(), rtol=0, atol=1e-9)


def odd_strides(shape: tuple[int, ...], strides: tuple[int, ...]):
    """A tensor that PyTorch takes for channels_last, though not by the strides of its sizes of 1."""
    x = torch.empty_strided(shape, strides, dtype=torch.float64)
    assert not x.is_contiguous() and x.movedim(1, -1).is_contiguous()
    return x.copy_(torch.randn(shape, dtype=torch.float64))


@pytest.mark.parametrize("cls, options", LAYERS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "shape, strides",
    [
        ((1, CHANNELS, 1, 5), (CHANNELS, 1, 1, CHANNELS)),
        ((3, CHANNELS, 1, 5), (5 * CHANNELS, 1, 1, CHANNELS)),
        ((1, CHANNELS, 1, 3, 1), (CHANNELS, 1, 1, CHANNELS, CHANNELS)),
    ],
)
def test_strides_that_pytorch_misreads(cls, options, training, shape, strides):
    """PyTorch's batch normalisation gives wrong gradients for such an input."""
    layer = randomise(cls(CHANNELS, activation="identity", **options)).train(training)
    x, dz = odd_strides(shape, strides), torch.randn(shape, dtype=torch.float64)
    results = []
    for source in (x.contiguous(), x):
        leaf = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype).copy_(source).requires_grad_()
        given = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype).copy_(leaf)
        z = layer(given)
        results.append((z, *torch.autograd.grad(z, [leaf, *layer.parameters()], dz)))
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


def test_only_misread_inputs_are_copied():
    layer = ABN(CHANNELS)
    batch = torch.randn(2, CHANNELS, 3, 4).to(memory_format=torch.channels_last)
    for x in (batch, batch[:1], batch[:1, :, :1], batch[..., ::2], batch.contiguous(), batch.contiguous()[:1, :, :1]):
        z = layer(x.requires_grad_(False).clone(memory_format=torch.preserve_format).requires_grad_())
        node = z.grad_fn.next_functions[0][0]
        assert "BatchNorm" in node.name() and "AccumulateGrad" in node.next_functions[0][0].name()
    z = layer(odd_strides((1, CHANNELS, 1, 5), (CHANNELS, 1, 1, CHANNELS)).float().requires_grad_())
    assert "AccumulateGrad" not in z.grad_fn.next_functions[0][0].next_functions[0][0].name()


@pytest.mark.parametrize("first", [torch.relu, lambda x: InPlaceABN(CHANNELS)(x)], ids=["relu", "inplace"])
def test_overwriting_what_an_earlier_operation_kept_raises(first):
    x = torch.randn(2, CHANNELS, 4, 4, requires_grad=True)
    z = InPlaceABN(CHANNELS, overwrite_input=True)(first(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize("cls", [ABN, InPlaceABN])
def test_stacked_layers_and_relu_before(cls):
    """Adjacent layers do not disturb each other's saved values."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.ReLU(), cls(CHANNELS), cls(CHANNELS), cls(CHANNELS, activation="identity")).double()
    x = torch.randn(2, CHANNELS, 4, 4, dtype=torch.float64, requires_grad=True)
    dz = torch.randn_like(x)
    (dx,) = torch.autograd.grad(network(x), x, dz)
    expected = F.relu(x)
    for activation in ("leaky_relu", "leaky_relu", "identity"):
        expected = activate(activation, 0.01, F.batch_norm(expected, None, None, training=True))
    torch.testing.assert_close(dx, torch.autograd.grad(expected, x, dz)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", ["I", "II"])
def test_scale_of_zero_is_floored_in_training_and_recovers(variant):
    """gamma = copysign(max(|w|, floor), w); dL/dw is dL/dgamma, so a weight of zero moves."""
    layer = InPlaceABN(CHANNELS, variant=variant, gamma_floor=1e-3).double()
    weight = torch.tensor([0.0, -0.0, 1e-4, -1e-4, 0.5, -0.5], dtype=torch.float64)
    gamma = torch.tensor([1e-3, -1e-3, 1e-3, -1e-3, 0.5, -0.5], dtype=torch.float64)
    assert torch.equal(floored(weight, 1e-3), gamma)
    with torch.no_grad():
        layer.weight.copy_(weight)
    x = torch.randn(4, CHANNELS, 5, 5, dtype=torch.float64, requires_grad=True)
    dz = torch.randn_like(x)
    z = layer(x)
    gamma.requires_grad_()
    expected = reference(layer, x, gamma, torch.zeros_like(gamma))
    torch.testing.assert_close(z, expected, rtol=0, atol=1e-12)
    ours = torch.autograd.grad(z, [x, layer.weight], dz)
    theirs = torch.autograd.grad(expected, [x, gamma], dz)
    for gradient, expected_gradient in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-10)
    assert (ours[1] != 0).all()


def test_scale_is_raw_in_eval():
    layer = InPlaceABN(2, gamma_floor=1e-1).eval()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.0, -0.01]))
        layer.bias.copy_(torch.tensor([0.25, 0.5]))
    standard = ABN(2).eval()
    standard.load_state_dict(layer.state_dict())
    x = torch.randn(3, 2, 4, 4, requires_grad=True)
    assert torch.equal(layer(x), standard(x))
    assert (layer(x)[:, 0] == 0.25).all()
    (dx,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(standard(x).sum(), x)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", ["I", "II"])
def test_half_precision_activations_with_float32_parameters(dtype, variant):
    layer, standard = InPlaceABN(CHANNELS, variant=variant), ABN(CHANNELS)
    x = torch.randn(8, CHANNELS, 16, 16)
    dz = torch.randn_like(x)
    expected_input = x.clone().requires_grad_()
    expected = torch.autograd.grad(standard(expected_input), [expected_input, *standard.parameters()], dz)
    low = x.to(dtype).requires_grad_()
    z = layer(low)
    gradients = torch.autograd.grad(z, [low, *layer.parameters()], dz.to(dtype))
    assert z.dtype == gradients[0].dtype == dtype
    assert gradients[1].dtype == gradients[2].dtype == layer.running_mean.dtype == torch.float32
    for gradient, reference_gradient in zip(gradients, expected, strict=True):
        error = (gradient.float() - reference_gradient).norm() / reference_gradient.norm()
        assert error < 4 * torch.finfo(dtype).eps


def test_saturated_elu_has_finite_gradients():
    layer = InPlaceABN(1, activation="elu", activation_param=1.0)
    with torch.no_grad():
        layer.weight.fill_(30.0)
    x = torch.randn(8, 1, 16, 16, requires_grad=True)
    z = layer(x)
    assert (z == -1).any()  # rounded to the asymptote in float32
    gradients = torch.autograd.grad(z, [x, *layer.parameters()], torch.randn_like(x))
    assert all(g.isfinite().all() for g in gradients)


def test_expanded_gradients():
    """`sum().backward()` passes an expanded gradient."""
    x = torch.randn(2, CHANNELS, 4, 4, dtype=torch.float64, requires_grad=True)
    for layer in (InPlaceABN(CHANNELS).double(), InPlaceABN(CHANNELS, variant="I").double()):
        (dx,) = torch.autograd.grad(layer(x).sum(), x)
        (expected,) = torch.autograd.grad(ABN(CHANNELS).double()(x).sum(), x)
        torch.testing.assert_close(dx, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("cls", [ABN, InPlaceABN])
@pytest.mark.parametrize("shape", [(1, CHANNELS), (1, CHANNELS, 1, 1), (0, CHANNELS, 4, 4)])
def test_one_value_per_channel_is_refused(cls, shape):
    layer = cls(CHANNELS)
    with pytest.raises(ValueError, match="at least two crops"):
        layer(torch.randn(shape))
    assert layer.num_batches_tracked == 0
    assert layer.eval()(torch.randn(shape)).shape == shape


@pytest.mark.parametrize("cls", [ABN, InPlaceABN])
def test_unfit_inputs_are_refused(cls):
    layer = cls(CHANNELS)
    with pytest.raises(ValueError, match=r"\(2, 5, 4, 4\).*expected \(N, 6"):
        layer(torch.randn(2, 5, 4, 4))
    with pytest.raises(ValueError, match=r"\.double\(\)"):
        layer(torch.randn(2, CHANNELS, 4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="torch.int64 input: expected float64"):
        layer(torch.ones(2, CHANNELS, 4, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="autocast"):
        layer.bfloat16()(torch.randn(2, CHANNELS, 4, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("cls", [ABN, CheckpointedABN, InPlaceABN])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
@pytest.mark.parametrize("inputs, own", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float64)])
def test_every_parameter_and_buffer_must_have_the_right_dtype(cls, training, name, inputs, own):
    """E.g. FSDP2 casts parameters but not buffers."""
    layer = cls(CHANNELS).train(training)
    values = getattr(layer, name)
    setattr(layer, name, nn.Parameter(values.to(own)) if isinstance(values, nn.Parameter) else values.to(own))
    with pytest.raises(ValueError, match=f"{inputs} input.*{name} is {own}.*expected float64 .*float32.*autocast"):
        layer(torch.randn(2, CHANNELS, 4, 4, dtype=inputs))
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"activation": "relu"}, "cannot recover.*leaky_relu"),
        ({"activation": "swish"}, "'swish' is not known; choose one of leaky_relu"),
        ({"activation": "leaky_relu", "activation_param": 0.0}, "slope above 0"),
        ({"activation": "elu", "activation_param": -1.0}, "above 0"),
        ({"activation_param": float("nan")}, "slope above 0"),
        ({"activation_param": float("inf")}, "slope above 0"),
        ({"variant": "III"}, "'III': expected 'I' or 'II'"),
        ({"gamma_floor": 0.0}, "gamma_floor=0.0"),
    ],
)
def test_options_without_a_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        InPlaceABN(CHANNELS, **options)


@pytest.mark.parametrize("cls", [ABN, CheckpointedABN])
@pytest.mark.parametrize("slope", [-0.1, float("nan")])
def test_slopes_that_no_derivative_can_be_taken_of_are_refused(cls, slope):
    with pytest.raises(ValueError, match="not a valid slope.*0 or more"):
        cls(CHANNELS, activation_param=slope)


def test_standard_layer_has_relu():
    layer = randomise(ABN(CHANNELS, activation="relu"))
    x = torch.randn(2, CHANNELS, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(x), reference(layer, x, layer.weight, layer.bias))


def test_old_checkpoints_without_a_count_load():
    layer = InPlaceABN(CHANNELS)
    state = {name: tensor + 1 for name, tensor in layer.state_dict().items() if name != "num_batches_tracked"}
    names = set(state)
    with pytest.warns(UserWarning, match="num_batches_tracked"):
        layer.load_state_dict(state)
    assert set(state) == names
    assert (layer.running_mean == 1).all() and layer.num_batches_tracked == 0


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_synchronised_standard_norm_computes_on_the_backend_that_it_was_given(backend, monkeypatch):
    strategies = []

    class Captured:
        @staticmethod
        def apply(x, *arguments):
            strategies.extend(argument for argument in arguments if isinstance(argument, Strategy))
            return x

    monkeypatch.setattr(abn_module, "synchronised_group", lambda group: object())
    monkeypatch.setattr(abn_module, "BatchNormActivation", Captured)
    ABN(4, sync=True, backend=backend)(torch.randn(2, 4, 3, 3))
    assert [strategy.backend for strategy in strategies] == [backend]


@pytest.mark.parametrize("layer", [ABN, InPlaceABN, CheckpointedABN])
def test_an_empty_minibatch_has_empty_gradients_in_eval_mode(layer):
    norm = layer(4).eval()
    x = torch.randn(0, 4, 5, 5, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.shape == x.shape and not norm.weight.grad.any()
