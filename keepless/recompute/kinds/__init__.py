"""The plans and scripts of a network, one for each kind of input."""
