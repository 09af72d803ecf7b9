"""The papers' tables, with our scores beside the published ones; see scripts/evidence/tables.py."""

from scripts.evidence.tables import main

if __name__ == "__main__":
    main()
