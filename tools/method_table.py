"""Write the table of methods into docs/algorithms.md, from the presets. A test fails when the page is behind.

python tools/method_table.py            rewrite the table
python tools/method_table.py --check    exit 1 if it is not up to date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moerl.catalogue import markdown_table, method_rows

PAGE = Path(__file__).resolve().parents[1] / "docs" / "algorithms.md"
START, END = "<!-- methods: made by tools/method_table.py -->", "<!-- methods end -->"


def with_table(text: str) -> str:
    """The page with the table as it must be now."""
    before, _, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE}: the marks {START!r} and {END!r} are missing; put them back around the table")
    return f"{before}{START}\n{markdown_table(method_rows())}\n{END}{after}"


def main() -> int:
    """Rewrite or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    wanted = with_table(text)
    if wanted == text:
        return 0
    if args.check:
        sys.stderr.write(f"{PAGE}: the table of methods is not that of the presets; run tools/method_table.py\n")
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
