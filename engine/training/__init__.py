"""A training run: its planned memory, its steps, its end."""
