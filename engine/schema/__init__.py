"""Every configuration key, typed: its default, bounds and rules, and the messages that name it."""
