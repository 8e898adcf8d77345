"""Take a picture of a run's report with a headless Chromium (the picture in the README).

Examples:
    python tools/report_picture.py runs/demo-gspo docs/report.png
    python tools/report_picture.py runs/demo-gspo phone.png --width 390 --height 2000
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from moerl.analysis.report import write_report
from moerl.errors import MoerlError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
MIN_WINDOW = 500
"""Browsers make no narrower window; below it the page is shown in a frame."""


def main() -> int:
    """Write the report anew, photograph it, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("picture", type=Path, help="PNG to write")
    parser.add_argument("--width", type=int, default=1280, help="of the window, in CSS pixels (default %(default)s)")
    parser.add_argument("--height", type=int, default=1125, help="of the picture, in CSS pixels (default %(default)s)")
    args = parser.parse_args()
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        print(f"report_picture: none of {', '.join(BROWSERS)} is installed", file=sys.stderr)
        return 2
    try:
        page = write_report(args.run).resolve()
    except MoerlError as error:
        print(f"report_picture: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        if args.width < MIN_WINDOW:
            frame = Path(scratch) / "frame.html"
            size = f"border:0;width:{args.width}px;height:{args.height}px"
            frame.write_text(f'<body style="margin:0"><iframe src="{page.as_uri()}" style="{size}"></iframe>')
            page = frame
        command = [browser, *FLAGS, f"--user-data-dir={scratch}/profile", f"--window-size={args.width},{args.height}"]
        command += [f"--screenshot={args.picture.resolve()}", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode or not args.picture.is_file():
        print(f"report_picture: {browser} failed: {done.stderr.strip()[-500:]}", file=sys.stderr)
        return 1
    print(args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
