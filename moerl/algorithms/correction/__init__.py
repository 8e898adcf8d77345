"""Corrections of the train/rollout mismatch, one file each: detached weight and keep mask per token."""
