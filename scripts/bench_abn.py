"""Time and memory of BN + ACT (+ CONV) in every strategy (Figure 4); see scripts/evidence/abn/measurement.py."""

from scripts.evidence.abn.measurement import main

if __name__ == "__main__":
    main()
