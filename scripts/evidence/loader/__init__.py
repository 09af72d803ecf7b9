"""The training crops: speed, memory and start-up."""
