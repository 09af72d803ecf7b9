"""Open trained networks from their files, to evaluate them, predict images or export them."""

from engine.prediction.opening import evaluate, open_checkpoint, open_network

__all__ = ["evaluate", "open_checkpoint", "open_network"]
