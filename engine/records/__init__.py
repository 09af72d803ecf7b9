"""Records of a run: metrics, results, pictures, provenance."""
