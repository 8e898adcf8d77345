"""Two nodes with a server each: rank 0 asks both, and one that dies on the other node is started anew there.

Both nodes are this machine, each with a launcher of its own; the servers are the fake engine in the place of SGLang.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_sglang
import ranks
from served_runs import SERVED, SMALL

from moerl.rollout.sglang.processes import free_port

LIMIT_SECONDS = 300

SOURCE = f"""
import asyncio, dataclasses, json, os, pathlib, signal, sys
from moerl.rollout.fake_engine.serving import serve
from moerl.rollout.fake_engine.settings import FakeEngineConfig
line = sys.argv[1:]
given = {{word: line[line.index(word) + 1] for word in ("--host", "--port", "--config", "--weight-version")}}
key = json.load(open(given["--config"]))["admin-api-key"]
cfg = FakeEngineConfig(
    host=given["--host"], port=int(given["--port"]), admin_key=key, weight_version=given["--weight-version"],
    vocab_size={SERVED.vocab_size}, num_layers={SERVED.num_layers}, num_experts={SERVED.num_experts},
    lengths={SERVED.lengths!r}, token_seconds=0.02,
)
folder, apps = pathlib.Path(os.environ["FAKE_SGLANG_PIDS"]).parent, []
(folder / f"{{cfg.port}}.pid").write_text(str(os.getpid()))
def end(*_):
    (folder / f"{{cfg.port}}.json").write_text(json.dumps(apps[0]))
    os._exit(0)
async def run():
    async def watched(url, app):
        import aiohttp
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(url + "/fake/state") as answer:
                    apps[:] = [await answer.json()]
                await asyncio.sleep(0.2)
    tasks = []
    await serve(cfg, [], lambda url, app: tasks.append(asyncio.create_task(watched(url, app))))
signal.signal(signal.SIGTERM, end)
asyncio.run(run())
"""


def start(folder: Path, node: int, port: int, *overrides: str) -> subprocess.Popen[str]:
    """The launcher of one node, with a process of `moerl train`."""
    launcher = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "--master-port", str(port), "-m", "moerl"]
    given = [*SMALL, f"run.output_dir={folder}", "run.name=two", "evaluation.sets=[]", *overrides]
    return subprocess.Popen(
        [*command, "train", "configs/demo/gspo.yaml", *given],
        cwd=ranks.ROOT,
        env=ranks.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def engine(folder: Path, **servers: object) -> str:
    """The override for `rollout.engine`."""
    python = fake_sglang.make_python(folder, SOURCE, path=str(ranks.ROOT))
    given = {"python": str(python), "nodes": "all", "host": "node", "stop_seconds": 2.0, **servers}
    return f"rollout.engine={json.dumps({'name': 'sglang', 'health_seconds': 0.2, 'servers': given})}"


def rows(folder: Path) -> list[dict[str, float]]:
    path = folder / "two" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What every launcher said, once it has ended."""
    try:
        return [process.communicate(timeout=LIMIT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def wait_until(condition, processes: list[subprocess.Popen[str]]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert all(process.poll() is None for process in processes), outputs(processes)
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_server_of_another_node_serves_dies_and_is_started_anew_there(tmp_path: Path) -> None:
    given = [engine(tmp_path), "run.num_steps=500", "algorithm.routing=R3"]
    port = free_port("127.0.0.1")
    processes = [start(tmp_path, node, port, *given) for node in range(2)]
    wait_until(lambda: len(rows(tmp_path)) > 2, processes)
    logs = [(tmp_path / "two" / f"sglang-{index}.log").read_text() for index in range(2)]
    assert all("<key>" not in log and "Error" not in log for log in logs)
    pids = {path.stem: int(path.read_text()) for path in tmp_path.glob("*.pid")}
    assert len(pids) == 2
    (other,) = [port for port, pid in pids.items() if _launcher_of(pid) == processes[1].pid]
    os.kill(pids[other], signal.SIGKILL)
    wait_until(lambda: sum(row.get("engine/returns", 0) for row in rows(tmp_path)) >= 1, processes)
    count = len(rows(tmp_path))
    wait_until(lambda: len(rows(tmp_path)) > count + 1, processes)
    os.killpg(processes[0].pid, signal.SIGINT)
    said = outputs(processes)
    seen = rows(tmp_path)
    assert sum(row.get("engine/restarts", 0) for row in seen) == 1, said
    assert seen[1]["engine/fit_servers"] == seen[-1]["engine/fit_servers"] == 2
    assert all(row["rollout/errors"] == 0 and row["route/replay_coverage"] == 1.0 for row in seen[1:])
    states = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(states) == set(pids), "each was asked to end, and had answered"
    assert all(state["counts"]["/generate"] > 0 for state in states.values())
    now = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert not any(fake_sglang.is_alive(pid) for pid in [*now, *pids.values()])


def _launcher_of(pid: int) -> int:
    """The session that a server's trainer was started in: servers have one of their own, so by their parents."""
    launchers = []
    while pid > 1:
        launchers.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return next(one for one in launchers if "torch.distributed.run" in Path(f"/proc/{one}/cmdline").read_text())
