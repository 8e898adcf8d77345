"""Subcommands: each module has `HELP`, `add_arguments(parser)` and `run(args) -> int`; they parse, call and print."""
