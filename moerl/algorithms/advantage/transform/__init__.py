"""Advantage transforms, one file each: `(RewardTable, cfg) -> [n] float64`."""
