"""Time and memory of BN + ACT (+ CONV) in every strategy (Figure 4); see scripts/bench/abn.py."""

from scripts.bench.abn import main

if __name__ == "__main__":
    main()
