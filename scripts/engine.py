"""See datasets.py beside it."""

import datasets  # noqa: F401
