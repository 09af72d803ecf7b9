"""What every command's process needs: ranks, memory, signals, console, files."""
