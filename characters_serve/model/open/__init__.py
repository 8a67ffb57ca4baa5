"""Models that people have weights of: one file for each family, on the same cache and engine."""
