"""Whether a budget keeps its promises on a network: `keepless.prove`, and `python -m keepless.prove`."""
