"""What reversible networks save and cost; see scripts/evidence/reversible.py."""

from scripts.evidence.reversible import main

if __name__ == "__main__":
    main()
