"""Make a module fit an affine coupling: from one output, a scale and a shift (names as in MemCNN)."""

from torch import Tensor, nn


class AffineAdapterNaive(nn.Module):
    """s = exp(f(x)), t = f(x), with `module` as f."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.f = module

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x -> (s, t), both with the shape of f(x)."""
        shift = self.f(x)
        return shift.exp(), shift


class AffineAdapterSigmoid(nn.Module):
    """t = h[0::2], s = sigmoid(h[1::2] + 2) with h = f(x): even and odd channels of `module`'s output."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.f = module

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x -> (s, t), each with half the channels of f(x). ValueError if their number is odd."""
        h = self.f(x)
        if h.shape[1] % 2:
            raise ValueError(
                f"AffineAdapterSigmoid got {h.shape[1]} channels from {type(self.f).__name__}: expected an even "
                f"number, twice those of its input"
            )
        return (h[:, 1::2] + 2).sigmoid(), h[:, 0::2]
