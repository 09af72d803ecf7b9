"""Record a forward pass call by call, and learn entries by which further passes make the same calls."""
