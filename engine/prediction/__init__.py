"""Trained networks: opened from their files, to predict images here or to be exported."""

from engine.prediction.opening import open_network, trained_forward

__all__ = ["open_network", "trained_forward"]
