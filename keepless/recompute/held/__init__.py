"""What autograd holds in place of a tensor: the tensor itself, its signs, or a recipe."""
