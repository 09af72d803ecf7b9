"""What MemCNN documents runs after its import is changed."""

import torch
from torch import nn

import keepless as memcnn
from keepless.saved import kept_bytes


class Operation(nn.Module):
    """Convolution, norm and an inplace ReLU, as in MemCNN's examples."""

    def __init__(self, channels: int):
        super().__init__()
        self.seq = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(True))

    def forward(self, x):
        return self.seq(x)


def test_its_example():
    """A coupling and its wrapper are invertible; the wrapper restores its input, and trains."""
    torch.manual_seed(0)
    x = torch.rand(2, 10, 8, 8)
    coupling = memcnn.AdditiveCoupling(Fm=Operation(channels=5), Gm=Operation(channels=5))
    assert memcnn.is_invertible_module(coupling, test_input_shape=x.shape)
    wrapper = memcnn.InvertibleModuleWrapper(fn=coupling, keep_input=True, keep_input_inverse=True)
    wrapper.eval()
    assert memcnn.is_invertible_module(wrapper, test_input_shape=x.shape)
    assert torch.allclose(x, wrapper.inverse(wrapper.forward(x)), atol=1e-6)
    wrapper.train()(x).sum().backward()
    assert all(parameter.grad is not None for parameter in wrapper.parameters())


class Doubled(nn.Module):
    """A module of two inputs and outputs with an inverse."""

    def forward(self, x, y):
        return 2 * x, 2 * y

    def inverse(self, x, y):
        return x / 2, y / 2


def test_its_options():
    """Affine couplings with both adapters, several backward passes, no wrapper at all, several inputs."""
    torch.manual_seed(0)
    x = torch.rand(2, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    naive = memcnn.AffineCoupling(Operation(2), adapter=memcnn.AffineAdapterNaive)
    sigmoid = memcnn.create_coupling(nn.Conv2d(2, 4, 1), coupling="affine", adapter=memcnn.AffineAdapterSigmoid)
    for coupling in (naive.double(), sigmoid.double()):
        wrapper = memcnn.InvertibleModuleWrapper(coupling, num_bwd_passes=2, preserve_rng_state=True)
        plain = memcnn.InvertibleModuleWrapper(coupling, disable=True)
        assert kept_bytes(wrapper, lambda w=wrapper: w(x * 1)) == x.nbytes < kept_bytes(plain, lambda p=plain: p(x * 1))
        loss = wrapper(x * 1).square().sum()
        first, second = (torch.autograd.grad(loss, x, retain_graph=again) for again in (True, False))
        (expected,) = torch.autograd.grad(plain(x * 1).square().sum(), x)
        torch.testing.assert_close([*first, *second], [expected] * 2, rtol=1e-9, atol=1e-9)
    assert memcnn.is_invertible_module(Doubled(), test_input_shape=((2, 3), (2, 5)), atol=1e-5, random_seed=7)
    assert not memcnn.is_invertible_module(nn.ReLU(), test_input_shape=(2, 3))
