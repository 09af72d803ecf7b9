"""For developers: `python -m tools.NAME key=value …`."""

import engine.process.start  # noqa: F401
