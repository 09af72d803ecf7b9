"""Commands besides training and evaluation: `python -m scripts.NAME key=value …`."""
