"""Checkpoints from one form into another: Hugging Face folders, sharded checkpoints, checkpoints of runs.

`places` says what a path holds, `layouts` how a layout cuts a model, `building` makes a folder file by file; `imports`
and `exports` are the two directions, `compare` and `inspection` look.
"""
