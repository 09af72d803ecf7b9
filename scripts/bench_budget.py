"""What a byte budget costs in known networks; see scripts/evidence/networks_budget.py."""

from scripts.evidence.networks_budget import main

if __name__ == "__main__":
    main()
