"""A small language model in plain PyTorch, built like Llama."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 4096


class Attention(nn.Module):
    """Causal attention, in which positions turn queries and keys (Su et al., RoFormer, 2021)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, C) -> (N, T, C)"""
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)  # (N, heads, T, C / heads)
        return self.out(z.transpose(1, 2).reshape(n, length, width))


def turned(x: Tensor) -> Tensor:
    """Rotate pairs of channels of (N, heads, T, D) by angles that grow with the position."""
    half = x.shape[-1] // 2
    rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(10_000.0) / half))
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device), rates)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class SwiGLU(nn.Module):
    """Shazeer, GLU Variants Improve Transformer, 2020."""

    def __init__(self, width: int):
        super().__init__()
        hidden = 8 * width // 3 // 8 * 8
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width), Attention(width, heads)
        self.norm2, self.branch = nn.RMSNorm(width), SwiGLU(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.branch(self.norm2(x))


class Decoder(nn.Module):
    """Tokens (N, T) -> logits (N, T, VOCABULARY), by `depth` blocks."""

    def __init__(self, width: int, heads: int, depth: int):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.RMSNorm(width)
        self.classifier = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classifier(self.norm(self.blocks(self.tokens(tokens))))
