"""Speed, memory and start-up of the training crops; see scripts/evidence/loader/measurement.py."""

from scripts.evidence.loader.measurement import main

if __name__ == "__main__":
    main()
