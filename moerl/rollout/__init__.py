"""Prompts to groups of finished episodes: engines, the collector and the buffer."""
