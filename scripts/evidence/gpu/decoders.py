"""Small language models in plain PyTorch, built like GPT-2 and like Llama."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 4096


class Attention(nn.Module):
    """Causal attention. `rotary`: positions turn queries and keys (Su et al., RoFormer, 2021)."""

    def __init__(self, width: int, heads: int, rotary: bool, bias: bool):
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, C) -> (N, T, C)"""
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.rotary:
            q, k = turned(q), turned(k)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (N, heads, T, C / heads)
        return self.out(z.transpose(1, 2).reshape(n, length, width))


def turned(x: Tensor) -> Tensor:
    """Rotate pairs of channels of (N, heads, T, D) by angles that grow with the position."""
    half = x.shape[-1] // 2
    rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(10_000.0) / half))
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device), rates)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class GELUBranch(nn.Sequential):
    def __init__(self, width: int):
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))


class SwiGLUBranch(nn.Module):
    """Shazeer, GLU Variants Improve Transformer, 2020."""

    def __init__(self, width: int):
        super().__init__()
        hidden = 8 * width // 3 // 8 * 8
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module], attention: nn.Module, branch: nn.Module, width: int):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.branch = norm(width), attention, norm(width), branch

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.branch(self.norm2(x))


class Decoder(nn.Module):
    """Tokens (N, T) -> logits (N, T, VOCABULARY).

    Args:
        llama: RMSNorm, rotary positions, SwiGLU and no biases, as in Llama; otherwise LayerNorm, learned positions,
            GELU and a classifier with the weights of the embedding, as in GPT-2.
    """

    def __init__(self, llama: bool, width: int, heads: int, depth: int, length: int):
        super().__init__()
        norm: Callable[[int], nn.Module] = nn.RMSNorm if llama else nn.LayerNorm
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = None if llama else nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(
            *(
                Block(
                    norm,
                    Attention(width, heads, rotary=llama, bias=not llama),
                    SwiGLUBranch(width) if llama else GELUBranch(width),
                    width,
                )
                for _ in range(depth)
            )
        )
        self.norm = norm(width)
        self.classifier = nn.Linear(width, VOCABULARY, bias=False)
        if not llama:
            self.classifier.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places[: tokens.shape[1]]
        return self.classifier(self.norm(self.blocks(x)))


def decoder(llama: bool, rehearse: bool) -> Decoder:
    """A network of 12 blocks of 768 channels for 1024 tokens; in a rehearsal, of 2 blocks of 32 for 16."""
    width, heads, depth, length = (32, 2, 2, 16) if rehearse else (768, 12, 12, 1024)
    return Decoder(llama, width, heads, depth, length)
