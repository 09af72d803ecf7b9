"""Record each forward pass call by call; earlier passes give advice."""
