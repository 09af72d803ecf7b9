"""Small networks like those that people train: GPT-2, Whisper and Llama, in plain PyTorch.

A network's blocks run through `run`, which a test may replace by a checkpoint.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Blocks(nn.Module):
    """A network of blocks."""

    def run(self, block: nn.Module, *arguments: Any) -> Tensor:
        return block(*arguments)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(N, T, C) to (N, heads, T, C / heads)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, share: float, causal: bool) -> Tensor:
    scores = q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return F.dropout(scores.softmax(-1), share) @ v


def fused_attention(q: Tensor, k: Tensor, v: Tensor, share: float, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=share, is_causal=causal)


class Layer(nn.Module):
    """Attention to itself, and to others if they are given, and two linear layers, each behind a norm."""

    def __init__(self, attend: Callable[..., Tensor], share: float, causal: bool = True):
        super().__init__()
        self.attend, self.share, self.causal = attend, share, causal
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.queries, self.others, self.out = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def attention(self, x: Tensor, others: Tensor, causal: bool) -> Tensor:
        q, k, v = (split_heads(one, 2) for one in (self.queries(x), *self.others(others).chunk(2, -1)))
        return F.dropout(self.out(self.attend(q, k, v, self.share, causal).transpose(1, 2).flatten(2)), self.share)

    def forward(self, x: Tensor, others: Tensor | None = None) -> Tensor:
        first, second, last = self.norms
        y = first(x)
        x = x + self.attention(y, y, self.causal)
        if others is not None:
            x = x + self.attention(second(x), others, False)
        return x + F.dropout(self.down(F.gelu(self.up(last(x)))), self.share)


class Text(Blocks):
    """GPT-2: the loss of the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, 32), nn.Parameter(torch.randn(128, 32))
        self.layers = nn.ModuleList(Layer(eager_attention, 0.1) for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        x = F.dropout(self.words(words) + self.positions, 0.1)
        for layer in self.layers:
            x = self.run(layer, x)
        return F.cross_entropy((x @ self.words.weight.T)[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class Whisper(Blocks):
    """An encoder of sounds, and a decoder that attends to what it has found."""

    def __init__(self) -> None:
        super().__init__()
        self.ears, self.words = nn.Conv1d(8, 32, 3, padding=1), nn.Embedding(50, 32)
        self.encoder = nn.ModuleList(Layer(fused_attention, 0.0, causal=False) for _ in range(2))
        self.decoder = nn.ModuleList(Layer(fused_attention, 0.0) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        heard = F.gelu(self.ears(F.one_hot(words % 8, 8).float().transpose(1, 2))).transpose(1, 2)
        for layer in self.encoder:
            heard = self.run(layer, heard)
        x = self.words(words)
        for layer in self.decoder:
            x = self.run(layer, x, heard)
        return F.cross_entropy((x @ self.words.weight.T).flatten(0, 1), words.flatten())


class LlamaLayer(nn.Module):
    """Rotary attention and SwiGLU, each behind an RMSNorm written out."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(2, 32))
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)
        self.gate, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def normalised(x: Tensor, scale: Tensor) -> Tensor:
            return scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

        def rotated(x: Tensor) -> Tensor:
            left, right = x.chunk(2, -1)
            return x * cos + torch.cat((-right, left), -1) * sin

        q, k, v = (split_heads(one, 2) for one in self.qkv(normalised(x, self.scales[0])).chunk(3, -1))
        x = x + self.out(fused_attention(rotated(q), rotated(k), v, 0.0, True).transpose(1, 2).reshape(x.shape))
        y = normalised(x, self.scales[1])
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(50, 32), nn.ModuleList(LlamaLayer() for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        angles = torch.arange(words.shape[1])[:, None] / 10000 ** (torch.arange(16) % 8 / 8)
        x = self.words(words)
        for layer in self.layers:
            x = self.run(layer, x, angles.cos(), angles.sin())
        return F.cross_entropy((x @ self.words.weight.T)[:, :-1].flatten(0, 1), words[:, 1:].flatten())


TEXTS = {"GPT-2": Text, "Whisper": Whisper, "Llama": Llama}
