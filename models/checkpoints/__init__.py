"""Checkpoints of others, the paper's authors' and torchvision's, and loading by name and shape."""
