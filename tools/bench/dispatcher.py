"""Completions a second of the dispatcher, and its processor time per completion against a bare HTTP client's.

    python tools/bench/dispatcher.py --completions 10000            64 output tokens with logprobs, no routes
    python tools/bench/dispatcher.py --routes --completions 400     routes of 48 layers x 8 experts

The fake server runs in a process of its own and is pinned to the last core, this process to the first, where there are
two. Each round measures, one after the other: `bare` (aiohttp posts the same bytes, reads and parses the answer), the
dispatcher, and the dispatcher from another event loop, as the engine is called. Processor time is this process's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import aiohttp
import numpy as np
import orjson

from moerl.rollout.engine import RouteLayout
from moerl.rollout.sglang.client import SglangClient
from moerl.rollout.sglang.dispatcher import Dispatcher, DispatchSettings
from moerl.rollout.sglang.wire import Expected, WireRequest, payload
from moerl.types import SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
One = Callable[[int], Awaitable[object]]


def main() -> int:
    """Measure, print a table, and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=4000, help="of each side, in each round")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
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
    print(f"{'side':<12}{'completions/s':>16}{'CPU us each':>14}   (medians of {args.rounds} rounds)")
    for side, rounds in found.items():
        rate, cpu = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(f"{side:<12}{rate:>16.0f}{cpu * 1e6:>14.0f}")
    ratio = statistics.median(d[1] / b[1] for b, d in zip(found["bare"], found["dispatcher"], strict=True))
    print(f"processor time of the dispatcher over the bare client's: {ratio:.2f}")
    print(json.dumps({"routes": args.routes, "cpu_ratio": ratio, "rounds": found}))
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

    loop = asyncio.get_running_loop()

    async def from_another_loop() -> tuple[float, float]:
        def work() -> tuple[float, float]:
            async def one(number: int) -> object:
                handed = asyncio.run_coroutine_threadsafe(_as_coroutine(through_dispatcher(number)), loop)
                return await asyncio.wrap_future(handed)

            return asyncio.run(_timed(one, args.completions, args.concurrency))

        return await asyncio.to_thread(work)

    found: dict[str, list[tuple[float, float]]] = {"bare": [], "dispatcher": [], "two loops": []}
    await _timed(bare, min(args.completions, 200), args.concurrency)
    for _ in range(args.rounds):
        found["bare"].append(await _timed(bare, args.completions, args.concurrency))
        found["dispatcher"].append(await _timed(through_dispatcher, args.completions, args.concurrency))
        found["two loops"].append(await from_another_loop())
    await session.close()
    await client.close()
    return found


async def _as_coroutine(awaitable: Awaitable[object]) -> object:
    return await awaitable


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
