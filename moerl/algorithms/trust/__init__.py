"""Trust regions, one file each: a config dataclass and a function of (log-ratio, inputs, config)."""
