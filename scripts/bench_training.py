"""Speed and memory of training steps under every switch; see scripts/evidence/training.py."""

from scripts.evidence.training import main

if __name__ == "__main__":
    main()
