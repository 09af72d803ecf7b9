"""What a run writes down: metrics, results, pictures, waits, where it ran."""
