"""A run: configuration, training loop, evaluation, checkpoints and reports."""
