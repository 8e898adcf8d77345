"""One file per way for a bucket of weights to reach engines."""
