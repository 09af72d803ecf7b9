"""A training step as data, counted on a copy of the network, and the search for what it keeps."""
