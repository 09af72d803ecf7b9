"""Speed, memory and start-up of the training crops; see scripts/bench/loader.py."""

from scripts.bench.loader import main

if __name__ == "__main__":
    main()
