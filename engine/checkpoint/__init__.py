"""Checkpoints: files, their parts and old formats, and the run directory that holds them."""
