"""Dumps of other stacks as `TokenBatch`; nothing here unpickles an object of theirs, or runs code from a file."""
