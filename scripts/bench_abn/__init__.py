"""Time and memory of BN + ACT (+ CONV) in every strategy (paper, section 4.3 and Figure 4), and beyond."""
