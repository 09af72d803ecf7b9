"""Batch normalisation with an activation, in every strategy of the in-place ABN paper's Figure 2."""
