"""The measurements that need a card, in parts of a few minutes: `python -m scripts.gpu_evidence`."""
