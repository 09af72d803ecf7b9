"""What `recompute_activations` saves and costs in known networks; see scripts/bench/networks.py."""

from scripts.bench.networks import main

if __name__ == "__main__":
    main()
