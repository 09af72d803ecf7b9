"""What a user runs beside training, each as a module: `python -m scripts.NAME key=value …`."""
