"""One of the processes of the loop tests: whole runs of `moerl train`, one after the other, in several layouts.

Started by torchrun (or alone) as `loop_worker.py PLAN.json`. A plan lists cases: name, configuration, overrides. Each
case is run to its end as `<name>`, and as `<name>.parts`: one step, then everything built anew and the rest. One with
overrides to go on with has its first step go on under them too, as `<name>.moved`.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moerl.build import build_run
from moerl.configure import load
from moerl.finish import finish_run
from moerl.loop import train
from moerl.mcore.parallel import release_parallel
from moerl.mcore.team import joined
from moerl.protocols import Team
from moerl.world import launched_world

STEPS = 2


def run(case: dict[str, Any], team: Team, name: str, num_steps: int) -> None:
    """Build, train and end one run, as `moerl train` does."""
    random.seed(team.rank)  # what an earlier run left behind must not be what a checkpoint forgot
    np.random.seed(team.rank)
    torch.manual_seed(team.rank)
    cfg = load(case["config"], [*case["overrides"], f"run.name={name}", f"run.num_steps={num_steps}"])
    parts = build_run(cfg, team)
    assert parts is not None
    train(parts.rooms, parts.schedule, parts.resume_from)
    finish_run(cfg, parts.folder, parts.rooms.policy, parts.rooms.records.seconds, is_leader=team.is_leader)
    parts.close()
    team.meet()
    release_parallel()


def set_aside(folder: Path, name: str, *, moves: bool) -> None:
    """The weights after the first step; and all of the run, where it goes on in another way too."""
    (folder / f"{name}.parts" / "hf").rename(folder / f"{name}.after_1")
    if moves:
        shutil.copytree(folder / f"{name}.parts", folder / f"{name}.moved")


def main() -> None:
    """Run every case."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    world = launched_world()
    with joined(world, load(plan[0]["config"], plan[0]["overrides"]).parallel) as team:
        for case in plan:
            name = case["name"]
            run(case, team, f"{name}.parts", 1)
            if team.is_leader:
                set_aside(Path(case["folder"]), name, moves=bool(case["onward"]))
            team.meet()
            if case["onward"]:
                run({**case, "overrides": case["onward"]}, team, f"{name}.moved", STEPS)
            if not world.is_alone:
                run(case, team, f"{name}.parts", STEPS)
                run(case, team, name, STEPS)
            print(name, flush=True)


if __name__ == "__main__":
    main()
