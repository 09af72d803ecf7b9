"""Networks: bodies, heads and their combinations. They take keyword arguments and return features or logits."""
