"""What a pass gets, by the signature of its inputs: advice, and within a budget a plan."""
