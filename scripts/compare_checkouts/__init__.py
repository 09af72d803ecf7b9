"""The same short commands in two checkouts of this project: which of their results differ, to the bit."""
