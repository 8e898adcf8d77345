"""Filters, one file each, and what puts them together."""

from moerl.algorithms.filtering import Filters, build_filters

__all__ = ["Filters", "build_filters"]
