"""Checkpoints: files, their parts, the run directory that holds them, and weights to start from."""
