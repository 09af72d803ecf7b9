"""Benchmarks: a file for each question, on one frame."""
