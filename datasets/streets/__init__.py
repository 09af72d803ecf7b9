"""Drawn street scenes with exact labels: the pictures of the synthetic dataset."""

from datasets.streets.scene import draw_street

__all__ = ["draw_street"]
