"""Asks a process of SGLang's own environment (`sglang_inside.py`), which takes half a minute to import it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from moerl.rollout.sglang.servers import server_environment


def inside(python, asked):
    """The answers to `asked`, both as `sglang_inside.py` describes them."""
    done = subprocess.run(
        [python, Path(__file__).with_name("sglang_inside.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=server_environment("cpu", 1),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
