"""What autograd holds in place of a tensor: the tensor itself, its sign mask, or a recipe."""
