"""BN + ACT (+ CONV) in every strategy (Figure 4)."""
