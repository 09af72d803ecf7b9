"""Every configuration key, typed: its default, bounds and rules, and the messages that name it.

`training.py` holds the keys of every run; each task has a file of its own.
"""
