"""A training run: its plan in memory, its steps, its end."""
