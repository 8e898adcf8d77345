"""A picture of what ran when, from the trace.json of one or several runs, one below the other.

python tools/timeline.py runs/a/trace.json runs/b/trace.json --seconds 20 --skip 10 --out docs/timeline.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LEARNER, PHASES = 1, 2
COLOURS = {
    "update": "#c0504d",
    "score": "#e0a03c",
    "publish": "#7f5fa8",
    "evaluate": "#4f9d69",
    "checkpoint": "#888888",
}
GROUP, WAIT = "#5b8fc7", "#eeeeee"


def draw(axes: Any, path: Path, skip: float, seconds: float, title: str) -> None:
    """One run: the learner's phases on top, the groups on their lanes below."""
    events = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    start = min(event["ts"] for event in events) / 1e6 + skip
    lanes = 1
    for event in events:
        at, length = event["ts"] / 1e6 - start, event["dur"] / 1e6
        if at + length < 0 or at > seconds:
            continue
        if event["pid"] == LEARNER:
            if event["tid"] == PHASES:
                axes.broken_barh([(at, length)], (-6, 5), facecolors=COLOURS.get(event["name"], WAIT))
        else:
            lanes = max(lanes, event["tid"] + 1)
            axes.broken_barh([(at, length)], (event["tid"], 0.85), facecolors=GROUP)
    axes.set_xlim(0, seconds)
    axes.set_ylim(lanes + 0.5, -6.5)
    axes.set_yticks([-3.5, lanes / 2], ["learner", "groups"])
    axes.set_title(title, loc="left", fontsize=10)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="trace.json of each run, drawn one below the other")
    parser.add_argument("--titles", nargs="+", help="one for each; default: the run's folder")
    parser.add_argument("--skip", type=float, default=0.0, help="seconds at the start that are left out (default 0)")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds to draw (default 20)")
    parser.add_argument("--out", type=Path, required=True, help="PNG to write")
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    titles = args.titles or [path.parent.name for path in args.traces]
    figure, axes = plt.subplots(len(args.traces), 1, figsize=(10, 2.6 * len(args.traces)), sharex=True, squeeze=False)
    for one, path, title in zip(axes[:, 0], args.traces, titles, strict=True):
        draw(one, path, args.skip, args.seconds, title)
    axes[-1, 0].set_xlabel("seconds")
    named = {**COLOURS, "waits for answers": WAIT, "a group of answers": GROUP}
    handles = [Patch(color=colour, label=name) for name, colour in named.items()]
    figure.legend(handles=handles, ncol=len(handles), loc="lower center", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
