"""Checkpoints: files, their parts, and the run directory that holds them."""
