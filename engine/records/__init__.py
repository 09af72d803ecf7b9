"""Records of a run: metrics, results, provenance."""
