"""What each strategy of the paper's Figure 2 keeps and recomputes; see scripts/evidence/strategy_table.py."""

from scripts.evidence.strategy_table import main

if __name__ == "__main__":
    main()
