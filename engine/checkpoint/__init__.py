"""Checkpoints: files, their parts, the run directory that holds them, and the networks in them."""

from engine.checkpoint.opening import open_network, trained_forward

__all__ = ["open_network", "trained_forward"]
