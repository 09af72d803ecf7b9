"""From the command line to typed configurations."""
