"""What every command's process has: ranks, memory, signals, console, files."""
