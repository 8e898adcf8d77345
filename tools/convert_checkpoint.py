"""`moerl convert` as a script: python tools/convert_checkpoint.py import HF_DIR OUT --expert 8."""

from __future__ import annotations

import sys

from moerl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
