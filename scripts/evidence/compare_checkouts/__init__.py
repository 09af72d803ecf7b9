"""Run the same short commands in two checkouts of this project and compare their results to the bit."""
