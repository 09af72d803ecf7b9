"""What `recompute_activations` saves and costs in known networks; see scripts/evidence/networks.py."""

from scripts.evidence.networks import main

if __name__ == "__main__":
    main()
