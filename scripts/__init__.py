"""Commands besides training and evaluation: `python -m scripts.NAME key=value …`."""

import engine.start  # noqa: F401
