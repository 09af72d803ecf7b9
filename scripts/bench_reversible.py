"""What reversible networks save and cost; see scripts/bench/reversible.py."""

from scripts.bench.reversible import main

if __name__ == "__main__":
    main()
