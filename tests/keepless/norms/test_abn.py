"""Every strategy against PyTorch's batch normalisation, activation and autograd."""

import copy
from functools import partial
from itertools import cycle, product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from keepless import ABN, CheckpointedABN, InPlaceABN, InPlaceABNSync, recompute_activations
from keepless.made_tensors import MadeTensors
from keepless.norms.backends.interface import floored
from keepless.norms.bn_act import recompute_output
from keepless.saved import saved_for_backward
from tests.norms import IN_PLACE, OVERWRITING, STRATEGIES

CHANNELS = 6
ACTIVATIONS = {"leaky_relu": 0.01, "elu": 1.0, "identity": 0.0, "sigmoid": 0.0, "tanh": 0.0}


PHI = {"leaky_relu": F.leaky_relu, "elu": F.elu, "identity": lambda y, _: y, "relu": lambda y, _: y.relu()}
PHI |= {"sigmoid": lambda y, _: y.sigmoid(), "tanh": lambda y, _: y.tanh()}


def randomise(layer: ABN) -> ABN:
    """Scales of both signs with |gamma| in 0.5 … 1.5, shifts within 0.5."""
    torch.manual_seed(1)
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.copy_((0.5 + torch.rand(CHANNELS)) * torch.tensor([1.0, -1.0]).repeat(CHANNELS // 2))
        if layer.bias is not None:
            layer.bias.copy_(torch.rand(CHANNELS) - 0.5)
        if layer.running_var is not None:
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2.0)
    return layer.double()


def reference(layer: ABN, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Batch normalisation written out, for autograd to differentiate."""
    shape = (1, -1, *(1,) * (x.dim() - 2))
    dims = [d for d in range(x.dim()) if d != 1]
    if layer.training or layer.running_mean is None:
        mean, var = x.mean(dims), x.var(dims, correction=0)
    else:
        mean, var = layer.running_mean, layer.running_var
    x_hat = (x - mean.view(shape)) / torch.sqrt(var.view(shape) + layer.eps)
    return PHI[layer.activation](gamma.view(shape) * x_hat + beta.view(shape), layer.activation_param)


LAYERS = STRATEGIES | OVERWRITING
FORMATS = [torch.contiguous_format, torch.channels_last]
SCALES = [{"affine": False}, {"learn_scale": False}, {"track_running_stats": False}]
assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)


@pytest.mark.parametrize("strategy", LAYERS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_equals_autograd_in_float64(strategy, training):
    """Each activation with a scale; missing vectors with one activation, since they are filled in before it.

    One gradient is expanded, as `sum().backward()` passes it. In eval mode no pass may move the running statistics.
    """
    activations = [*ACTIVATIONS, *([] if strategy.startswith("inplace") else ["relu"])]
    cases = [(activation, {}) for activation in activations] + [("leaky_relu", scale) for scale in SCALES]
    for (activation, scale), memory_format in product(cases, FORMATS):
        param = ACTIVATIONS.get(activation, 0.0)
        layer = randomise(LAYERS[strategy](CHANNELS, activation=activation, activation_param=param, **scale))
        layer.train(training)
        x = torch.randn(4, CHANNELS, 5, 7, dtype=torch.float64).to(memory_format=memory_format).requires_grad_()
        named = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
        ones = torch.ones(CHANNELS, dtype=torch.float64)
        expected = reference(layer, x, named.get("weight", ones), named.get("bias", 0 * ones))
        dz = torch.randn_like(expected)
        dz = dz[:1, :, :1, :1].expand_as(expected) if "learn_scale" in scale else dz
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_close(layer(x * 1), expected)
        z = layer(x * 1)  # not x itself: a leaf must not be overwritten
        assert_close(z, expected)
        wanted = torch.autograd.grad(expected, [x, *named.values()], dz)
        for retain in (True, False):  # the first backward pass leaves the graph as it was
            assert_close(torch.autograd.grad(z, [x, *layer.parameters()], dz, retain_graph=retain), wanted)
        assert z.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("strategy", LAYERS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("power", [1, 2], ids=["constant dz", "dz that depends on x"])
def test_a_second_derivative_is_right_or_raises(strategy, training, power):
    layer = randomise(LAYERS[strategy](CHANNELS)).train(training)
    x = torch.randn(3, CHANNELS, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randn(3, CHANNELS, 4, dtype=torch.float64)

    def penalty(output):
        (slope,) = torch.autograd.grad((output.pow(power) * target).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [x, layer.weight])

    if strategy != "std":
        with pytest.raises(RuntimeError, match="no second derivative; use ABN .*to_standard"):
            penalty(layer(x.sin()))
        return
    assert_close(penalty(layer(x.sin())), penalty(reference(layer, x.sin(), layer.weight, layer.bias)))


def test_the_paper_prints_a_wrong_sign():
    """dL/dx of in-place II from y (section 3.3): the second term of dL/dbeta is subtracted, not added as printed."""
    layer = randomise(InPlaceABN(CHANNELS, activation="identity"))
    x = torch.randn(4, CHANNELS, 5, 7, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)
    dx, vectors = gradients[0], (*gradients[1:], layer.weight, layer.bias)
    dgamma, dbeta, gamma, beta = (vector.view(-1, 1, 1) for vector in vectors)
    sigma = torch.rsqrt(x.var((0, 2, 3), correction=0) + layer.eps).view(-1, 1, 1)
    m = x.numel() // CHANNELS
    minus, plus = (
        gamma * sigma * (dy - y * dgamma / (gamma * m) - (dbeta + sign * beta / gamma * dgamma) / m) for sign in (-1, 1)
    )
    assert_close(minus, dx)
    assert (plus - dx).norm() > 1e-3 * dx.norm()


@pytest.mark.parametrize("strategy", LAYERS)
def test_running_statistics_equal_batchnorm2d_s(strategy):
    for momentum in (0.1, None):
        layer, standard = LAYERS[strategy](CHANNELS, momentum=momentum), nn.BatchNorm2d(CHANNELS, momentum=momentum)
        for _ in range(3):
            x = torch.randn(2, CHANNELS, 4, 4) * 3 + 1
            standard(x)
            layer(x.clone())
        for name, buffer in standard.named_buffers():
            torch.testing.assert_close(getattr(layer, name), buffer)
        layer.load_state_dict(standard.state_dict())  # and the names are the same
        # A memory planner traces networks on the meta device.
        assert layer.to("meta")(torch.empty(2, CHANNELS, 8, 8, device="meta")).shape == (2, CHANNELS, 8, 8)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dropped", [[], ["num_batches_tracked"], ["running_mean", "running_var"]], ids=len)
@pytest.mark.parametrize("flag", [True, False], ids=["tracked", "untracked"])
def test_statistics_switched_off_later_act_as_in_batchnorm2d(strategy, momentum, dropped, flag):
    layer = STRATEGIES[strategy](CHANNELS, momentum=momentum, activation="identity")
    standard = nn.BatchNorm2d(CHANNELS, momentum=momentum)
    for norm in (layer, standard):
        norm.track_running_stats = flag
        for name in dropped:
            setattr(norm, name, None)
    x = torch.randn(2, CHANNELS, 4, 4) * 3 + 1
    for training in (True, False):
        torch.testing.assert_close(layer.train(training)(x), standard.train(training)(x))
    for name in {"running_mean", "running_var"} - {*dropped}:
        torch.testing.assert_close(getattr(layer, name), getattr(standard, name))


def saved_bytes(layer: nn.Module, x: torch.Tensor) -> tuple[int, int, list[int]]:
    """Bytes that a layer keeps for its backward pass: of its output, of its input, and of each other storage."""
    z, saved = saved_for_backward(lambda: layer(x))
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    of_output, of_input = (storages.pop(tensor.untyped_storage().data_ptr(), 0) for tensor in (z, x))
    return of_output, of_input, sorted(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_saves_its_output_and_three_vectors(dtype):
    cases = zip(ACTIVATIONS, cycle([{"variant": "I"}, {"variant": "II"}, {"overwrite_input": True}]), strict=False)
    for activation, options in cases:
        layer = InPlaceABN(64, activation=activation, activation_param=1.0, **options)
        source = torch.randn(2, 64, 8, 8, dtype=dtype, requires_grad=True)
        # gamma, beta, 1 / sigma
        assert saved_bytes(layer, source * 1) == saved_bytes(layer.eval(), source * 1) == (source.nbytes, 0, [256] * 3)
    of_output, of_input, vector_bytes = saved_bytes(ABN(64), source.float())  # standard layers save their input too
    assert of_output == of_input == source.numel() * 4 and max(vector_bytes) <= 64 * 4


@pytest.mark.parametrize("strategy", [*IN_PLACE, *OVERWRITING])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_the_input_is_left_as_it_was_or_gives_its_buffer_to_the_output(strategy, memory_format):
    layer, overwrites = LAYERS[strategy](CHANNELS), strategy in OVERWRITING
    x = torch.randn(4, CHANNELS, 8, 8).to(memory_format=memory_format)
    before = x.clone()
    with MadeTensors() as counted:
        z = layer(x)
    vectors = counted.peak - (0 if overwrites else x.nbytes)
    assert 0 <= vectors < x.nbytes
    assert (z.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == overwrites
    assert torch.equal(x, z if overwrites else before)


def test_a_checkpointed_norm_computes_its_output_again_once():
    for store in ("x", "x_hat"):
        z = CheckpointedABN(CHANNELS, store=store)(torch.randn(2, CHANNELS, 3, 3))
        assert torch.equal(again := recompute_output(z.grad_fn), z) and recompute_output(z.grad_fn) is again


STRIDED = {
    "transposed": lambda: torch.randn(4, CHANNELS, 7, 5).transpose(2, 3) * 1,
    "channels sliced": lambda: torch.randn(4, 2 * CHANNELS, 5, 7)[:, :CHANNELS],
    "columns skipped": lambda: torch.randn(4, CHANNELS, 5, 14)[..., ::2],
    "channels last, cropped": lambda: torch.randn(4, 9, 9, CHANNELS).movedim(3, 1)[..., 2:7, 1:8],
    "matrix, transposed": lambda: torch.randn(CHANNELS, 40).t(),
    "volume, channels last": lambda: torch.randn(2, CHANNELS, 3, 4, 5).to(memory_format=torch.channels_last_3d),
}


@pytest.mark.parametrize("layout", STRIDED)
def test_every_memory_layout(layout):
    torch.manual_seed(0)
    for overwrite_input, training in product((False, True), (True, False)):
        x = STRIDED[layout]().double()
        layer = randomise(InPlaceABN(CHANNELS, overwrite_input=overwrite_input)).train(training)
        source = x.clone().requires_grad_()
        expected = reference(layer, source, layer.weight, layer.bias)
        dz = torch.randn_like(expected)
        leaf = torch.zeros((), dtype=torch.float64, requires_grad=True)
        inputs = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x).add_(leaf)
        assert inputs.stride() == x.stride()
        z = layer(inputs)
        assert_close(z, expected)
        assert (z.untyped_storage().data_ptr() == inputs.untyped_storage().data_ptr()) == overwrite_input
        (sum_of_dx,) = torch.autograd.grad(z, leaf, dz)
        assert_close(sum_of_dx, torch.autograd.grad(expected, source, dz)[0].sum(), atol=1e-9)


def odd_strides(shape: tuple[int, ...], strides: tuple[int, ...]):
    """A tensor that PyTorch takes for channels_last, though not by the strides of its sizes of 1."""
    x = torch.empty_strided(shape, strides, dtype=torch.float64)
    assert not x.is_contiguous() and x.movedim(1, -1).is_contiguous()
    return x.copy_(torch.randn(shape, dtype=torch.float64))


MISREAD = [  # shapes and strides
    ((1, CHANNELS, 1, 5), (CHANNELS, 1, 1, CHANNELS)),
    ((3, CHANNELS, 1, 5), (5 * CHANNELS, 1, 1, CHANNELS)),
    ((1, CHANNELS, 1, 3, 1), (CHANNELS, 1, 1, CHANNELS, CHANNELS)),
]


@pytest.mark.parametrize("strategy", LAYERS)
def test_strides_that_pytorch_misreads(strategy):
    """PyTorch's batch normalisation gives wrong gradients for such an input."""
    for (shape, strides), training in product(MISREAD, (True, False)):
        layer = randomise(LAYERS[strategy](CHANNELS, activation="identity")).train(training)
        x, dz = odd_strides(shape, strides), torch.randn(shape, dtype=torch.float64)
        results = []
        for source in (x.contiguous(), x):
            leaf = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype).copy_(source).requires_grad_()
            z = layer(torch.empty_strided(source.shape, source.stride(), dtype=source.dtype).copy_(leaf))
            results.append((z, *torch.autograd.grad(z, [leaf, *layer.parameters()], dz)))
        assert_close(*results)


def test_gradients_that_pytorch_misreads():
    """The gradient's strides fit both memory formats, and PyTorch assumes the wrong one."""
    x, gradient = torch.randn(1, 3, 1, 10)[..., :5], torch.randn(5, 3, 1, 1).transpose(0, 3)
    for layer in (InPlaceABN(3, activation="identity"), CheckpointedABN(3, activation="identity")):
        gradients = []
        for dz in (gradient, gradient.contiguous()):
            leaf = x.detach().requires_grad_()
            layer(leaf).backward(dz)
            gradients.append(leaf.grad)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


def test_overwriting_what_an_earlier_operation_kept_raises():
    for first in (nn.ReLU(), *(LAYERS[strategy](CHANNELS) for strategy in IN_PLACE)):
        x = torch.randn(2, CHANNELS, 4, 4, requires_grad=True)
        z = InPlaceABN(CHANNELS, overwrite_input=True)(first(x))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


@pytest.mark.parametrize("strategy", [*IN_PLACE, *OVERWRITING])
@pytest.mark.parametrize("prepare", [nn.Sequential, recompute_activations], ids=["plain", "recomputed"])
def test_writing_over_the_output_raises_and_says_what_to_write(strategy, prepare):
    layer, add = LAYERS[strategy](CHANNELS), lambda z: z.add_(1)
    for behind in (add, partial(F.relu, inplace=True), partial(F.dropout, inplace=True), torch.no_grad()(add)):
        network = nn.Sequential(nn.Conv1d(3, CHANNELS, 1), copy.deepcopy(layer), nn.Identity())
        network[2].forward = behind
        z = prepare(network)(torch.randn(2, 3, 4))
        with pytest.raises(RuntimeError, match="(?s)`out = out . x`.*inplace=False.* inplace operation"):
            z.sum().backward()


@pytest.mark.parametrize("strategy", OVERWRITING)
def test_an_input_that_autograd_does_not_let_go_is_named(strategy):
    leaf = torch.randn(2, 2 * CHANNELS, 4, requires_grad=True)
    with torch.inference_mode():
        inference = torch.randn(2, CHANNELS, 4)
    parts = leaf.sin().chunk(2, 1)[0], leaf.sin().split(CHANNELS, 1)[0]
    for x in (leaf[:, :CHANNELS], *parts, leaf.sin()[:, :1].expand(-1, CHANNELS, -1), inference):
        words = "leaf.*chunk, split .*expanded.*inference mode"
        with pytest.raises(RuntimeError, match=f"(?si)overwrite_input=True cannot.*{words}.*(in-?place|written-to)"):
            LAYERS[strategy](CHANNELS)(x)


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
    z, expected = layer(x), reference(layer, x, gamma.requires_grad_(), torch.zeros_like(gamma))
    assert_close(z, expected, atol=1e-12)
    ours = torch.autograd.grad(z, [x, layer.weight], dz)
    assert_close(ours, torch.autograd.grad(expected, [x, gamma], dz))
    assert (ours[1] != 0).all()
    standard = ABN(CHANNELS).double().eval()  # in eval mode the scale is the weight itself
    standard.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), standard(x))
    torch.testing.assert_close(*(torch.autograd.grad(norm(x).sum(), x) for norm in (layer, standard)))


@pytest.mark.parametrize("cls", [ABN, InPlaceABN])
def test_one_value_per_channel_and_unfit_inputs_are_refused(cls):
    layer = cls(CHANNELS)
    for shape in ((1, CHANNELS), (1, CHANNELS, 1, 1)):
        with pytest.raises(ValueError, match="at least two crops"):
            layer.train()(torch.randn(shape))
        assert layer.num_batches_tracked == 0
        assert layer.eval()(torch.randn(shape)).shape == shape
    x = torch.randn(2, CHANNELS, 4, 4)
    unfit = {r"\(2, 5, 4, 4\).*expected \(N, 6": x[:, :5], r"\.double\(\)": x.double()}
    for message, inputs in (unfit | {"torch.int64 input: expected float64": x.long()}).items():
        with pytest.raises(ValueError, match=message):
            layer(inputs)


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_every_parameter_and_buffer_must_have_the_right_dtype(name):
    """FSDP2, for example, casts parameters but not buffers."""
    dtypes = (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float64)
    for training, (inputs, dtype) in product((True, False), dtypes):
        layer = InPlaceABN(CHANNELS).train(training)
        values = getattr(layer, name)
        setattr(layer, name, nn.Parameter(values.to(dtype)) if isinstance(values, nn.Parameter) else values.to(dtype))
        with pytest.raises(
            ValueError, match=f"{inputs} input.*{name} is {dtype}.*expected float64 .*float32.*autocast"
        ):
            layer(torch.randn(2, CHANNELS, 4, 4, dtype=inputs))
        assert layer.num_batches_tracked == 0


@pytest.mark.parametrize(
    "cls, options, message",
    [
        (InPlaceABN, {"activation": "relu"}, "cannot recover.*leaky_relu"),
        (InPlaceABN, {"activation": "swish"}, "'swish' is not known; choose one of leaky_relu.* tanh$"),
        (InPlaceABNSync, {"activation": "none"}, "'none' is not known; .* is 'identity'"),
        (InPlaceABN, {"activation": "leaky_relu", "activation_param": 0.0}, "slope above 0"),
        (InPlaceABN, {"variant": "III"}, "'III': expected 'I' or 'II'"),
        (InPlaceABN, {"gamma_floor": 0.0}, "gamma_floor=0.0"),
        (ABN, {"eps": 0.0}, "eps=0.0: expected a number above 0"),
        (ABN, {"momentum": 1.5}, "momentum=1.5: expected 0 to 1"),
        (ABN, {"num_features": 0}, "num_features=0: expected .* at least 1"),
        (InPlaceABNSync, {"group": [0]}, r"group=\[0\]: expected a process group.*or None"),
        (ABN, {"activation_param": "0.1"}, "activation_param='0.1': expected a number"),
        (ABN, {"activation_param": -0.1}, "not a valid slope.*0 or more"),
    ],
)
def test_options_without_a_meaning_are_refused(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(**{"num_features": CHANNELS} | options)


@pytest.mark.parametrize("cls", [ABN, CheckpointedABN, InPlaceABN, InPlaceABNSync])
def test_attributes_that_were_set_later_are_refused_too(cls):
    layer = cls(CHANNELS)
    for attribute, value, message in (
        ("momentum", 2, "momentum=2: expected 0 to 1.*or None"),
        ("activation", "none", "'none' is not known; .* is 'identity'"),  # as programs for older versions set it
    ):
        setattr(layer, attribute, value)
        with pytest.raises(ValueError, match=message):
            layer(torch.randn(2, CHANNELS, 4))
        layer.momentum = 0.1


@pytest.mark.parametrize("cls", [ABN, InPlaceABN, CheckpointedABN])
def test_an_empty_minibatch_has_empty_gradients_and_no_statistics(cls):
    """A detector that proposes no regions has such minibatches."""
    for backend, training, shape in product(("auto", "compiled"), (True, False), ((0, 4, 5, 5), (2, 4, 0, 5))):
        norm = cls(4, backend=backend).train(training)
        x = torch.randn(shape, requires_grad=True)
        z = norm(x)
        z.sum().backward()
        assert z.shape == x.grad.shape == x.shape and not norm.weight.grad.any()
        assert not norm.running_mean.any() and norm.running_var.eq(1).all() and not norm.num_batches_tracked
