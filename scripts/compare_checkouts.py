"""The results of two checkouts, compared to the bit; see scripts/evidence/compare_checkouts."""

from scripts.evidence.compare_checkouts.__main__ import main

if __name__ == "__main__":
    main()
