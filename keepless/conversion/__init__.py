"""Convert whole networks from standard to in-place layers and back."""
