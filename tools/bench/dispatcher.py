"""Completions a second of the dispatcher, and its processor time per completion against a bare HTTP client's.

    python tools/bench/dispatcher.py --completions 10000            64 output tokens with logprobs, no routes
    python tools/bench/dispatcher.py --routes --completions 400     routes of 48 layers x 8 experts

The fake server runs in a process of its own and is pinned to the last core, this process to the first, where there are
two. Each round measures, one after the other: `bare` (aiohttp posts the same bytes, reads and parses the answer), the
dispatcher, and the engine, which hands requests to the dispatcher on a loop in a thread of its own. Processor time is
this process's; its smallest round is printed, since other work on the machine can only add to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import numpy as np
import orjson

from moerl.rollout.engine import RouteLayout, ServedModel
from moerl.rollout.engines.sglang_engine import SglangEngine, SglangEngineConfig
from moerl.rollout.sglang.client import SglangClient
from moerl.rollout.sglang.dispatcher import Dispatcher, DispatchSettings
from moerl.rollout.sglang.wire import Expected, WireRequest, payload
from moerl.types import SamplingParams
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
One = Callable[[int], Awaitable[object]]


def main() -> int:
    """Measure, print a table, and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=4000, help="of a side in a round (default %(default)s)")
    parser.add_argument("--concurrency", type=int, default=256, help="requests at once (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the best counts (default %(default)s)")
    parser.add_argument("--routes", action="store_true", help="routes of 48 layers x 8 experts of 128")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    server, url = _start_server(args.routes, cores[-1])
    try:
        found = asyncio.run(_measure(args, url))
    finally:
        server.terminate()
        server.wait()
    print(f"{'side':<12}{'completions/s':>16}{'CPU us each':>14}{'over bare':>12}   (best of {args.rounds} rounds)")
    least = {side: min(cpu for _, cpu in rounds) for side, rounds in found.items()}
    for side, rounds in found.items():
        rate = max(rate for rate, _ in rounds)
        print(f"{side:<12}{rate:>16.0f}{least[side] * 1e6:>14.0f}{least[side] / least['bare']:>12.2f}")
    print(json.dumps({"routes": args.routes, "cpu_seconds": least, "rounds": found}))
    return 0


def _start_server(routes: bool, core: int) -> tuple[subprocess.Popen[str], str]:
    shape = "--num-layers 48 --num-experts 128 --experts-per-token 8" if routes else ""
    command = [sys.executable, "-m", "moerl", "fake-engine", *shape.split(), "--max-running-requests", "4096"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(server.pid, [core])
    assert server.stdout is not None
    return server, server.stdout.readline().strip()


async def _measure(args: argparse.Namespace, url: str) -> dict[str, list[tuple[float, float]]]:
    layout = RouteLayout(48, tuple(range(48)), 8, 128) if args.routes else None
    prompts = [np.random.default_rng(i).integers(2, 320, PROMPT_TOKENS).astype(np.int32) for i in range(64)]
    client = SglangClient(url)
    dispatcher = Dispatcher(
        [client],
        settings=DispatchSettings(requests_per_server=args.concurrency),
        expected=Expected(layout, 320, {"default": 0}),
    )
    params = [SamplingParams(OUTPUT_TOKENS, seed=seed, return_routes=args.routes) for seed in range(args.completions)]

    def through_dispatcher(number: int) -> Awaitable[object]:
        return dispatcher.generate(prompts[number % 64], params[number], f"p/{number // 8}#{number % 8}")

    bodies = [
        orjson.dumps(payload(WireRequest(f"bare-{i:09d}", prompts[i % 64], params[i], 0 if args.routes else None)))
        for i in range(args.completions)
    ]
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=args.concurrency))

    async def bare(number: int) -> object:
        async with session.post(f"{url}/generate", data=bodies[number]) as response:
            return orjson.loads(await response.read())

    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(url, layout, Path(folder), args.concurrency)

        def through_engine(number: int) -> Awaitable[object]:
            return engine.generate(prompts[number % 64], params[number], f"p/{number // 8}#{number % 8}")

        sides: dict[str, One] = {"bare": bare, "dispatcher": through_dispatcher, "engine": through_engine}
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for one in sides.values():
            await _timed(one, min(args.completions, 200), args.concurrency)
        for _ in range(args.rounds):
            for side, one in sides.items():
                found[side].append(await _timed(one, args.completions, args.concurrency))
        await session.close()
        await client.close()
        engine.close()
    return found


def _engine(url: str, layout: RouteLayout | None, folder: Path, concurrency: int) -> SglangEngine:
    (folder / "config.json").write_text("{}")
    return SglangEngine(
        SglangEngineConfig(urls=[url], requests_per_server=concurrency),
        served_model=ServedModel(folder, folder, 320, layout, wants_routes=layout is not None),
        sender=DiskSender(DiskConfig(), SenderPlace(folder / "weights", folder)),
    )


async def _timed(one: One, count: int, concurrency: int) -> tuple[float, float]:
    """(completions a second, processor seconds of each), `concurrency` at a time."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await one(number)

    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return count / (time.perf_counter() - started), (time.process_time() - cpu) / count


if __name__ == "__main__":
    sys.exit(main())
