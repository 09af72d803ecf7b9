"""Parts of reports, for commands and for scripts.evidence: runs, published scores, charts and tables."""
