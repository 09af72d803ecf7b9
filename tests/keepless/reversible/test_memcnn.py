"""A program of MemCNN runs when its import is changed."""

import torch
from torch import nn

import keepless as memcnn


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
