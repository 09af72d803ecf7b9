"""Speed and memory of training steps under every switch; see scripts/bench/training.py."""

from scripts.bench.training import main

if __name__ == "__main__":
    main()
