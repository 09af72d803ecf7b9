"""Open trained networks from their files, to predict images or to export them."""

from engine.prediction.opening import open_network

__all__ = ["open_network"]
