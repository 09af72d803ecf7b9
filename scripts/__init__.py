"""Commands besides training and evaluation: `python -m scripts.NAME key=value …`."""

import engine.process.start  # noqa: F401
