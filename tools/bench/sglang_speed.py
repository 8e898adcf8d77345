"""Start-up time and tokens per second of a real SGLang server: `tools/bench/sglang_speed.py [--tensor 2]`.

Launches it on the demo's policy in float32 (`make sglang` first), asks for completions with logprobs and routes, 1, 8
and 32 at once, three rounds each; prints the fastest round. It says what tests can expect, nothing about a GPU.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from moerl.errors import MoerlError
from moerl.rollout.sglang.arguments import SglangServerConfig
from moerl.rollout.sglang.servers import Server, SglangServers

POLICY = Path(__file__).resolve().parents[2] / "configs" / "demo" / "policy"
PROMPT = [11, 14, 10, 15, 9, 14, 13, 18, 21]
NEW_TOKENS = 64
ROUNDS = 3


def complete(server: Server) -> int:
    """One completion; returns its number of tokens."""
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "return_routed_experts": True,
    }
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.admin_key}"}
    try:
        connection.request("POST", "/generate", json.dumps(body), headers)
        return len(json.loads(connection.getresponse().read())["output_ids"])
    finally:
        connection.close()


def tokens_per_second(server: Server, at_once: int) -> float:
    """Of the fastest round."""
    best = 0.0
    with ThreadPoolExecutor(at_once) as pool:
        for _ in range(ROUNDS):
            start = time.monotonic()
            tokens = sum(pool.map(complete, [server] * at_once))
            best = max(best, tokens / (time.monotonic() - start))
    return best


def measure(servers: SglangServers) -> None:
    """Start, ask, stop; a line for each."""
    start = time.monotonic()
    servers.start()
    print(f"start-up {time.monotonic() - start:.0f} s", flush=True)
    try:
        for at_once in (1, 8, 32):
            print(f"{at_once:>3} at once: {tokens_per_second(servers.servers[0], at_once):.0f} tokens/s", flush=True)
    finally:
        start = time.monotonic()
        servers.stop()
        print(f"stopped in {time.monotonic() - start:.1f} s")


def main() -> int:
    """Exit status 0, or 1 with one message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="auto", help="of the servers' environment (default: .venv-sglang)")
    parser.add_argument("--tensor", type=int, default=1, help="tensor and expert parallel ranks (default %(default)s)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = SglangServerConfig(
        python=options.python,
        tensor=options.tensor,
        expert=options.tensor,
        dtype="float32",
        max_running_requests=32,
    )
    try:
        with tempfile.TemporaryDirectory() as logs:
            measure(SglangServers(config, model_path=POLICY, log_folder=Path(logs), returns_routes=True))
    except MoerlError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
