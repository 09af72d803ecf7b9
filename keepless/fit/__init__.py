"""What fits on a device: `keepless.fit`, and `python -m keepless.fit`."""
