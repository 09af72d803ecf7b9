"""Records of a run: metrics, results, pictures, waits, provenance."""
