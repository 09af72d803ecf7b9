"""Parts of reports, for commands and for benchmarks: runs, published scores, charts and tables."""
