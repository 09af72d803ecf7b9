"""What a training step takes: the loop's overhead over a bare one, and every switch of precision and speed alone."""
