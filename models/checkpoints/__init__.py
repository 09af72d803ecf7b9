"""Third-party checkpoints (the paper's authors', torchvision's, timm's), and loading by name and shape."""
