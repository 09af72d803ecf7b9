"""Benchmarks: one frame, and a file for each thing that is measured."""
