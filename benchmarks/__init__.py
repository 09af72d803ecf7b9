"""The laboratory: a file for each question, `python -m benchmarks.NAME key=value …`. Nothing imports it."""

import engine.process.start  # noqa: F401
