"""Records what a real SGLang server answers: `.venv/bin/python tools/record_sglang.py [--tensor 2] [--out FOLDER]`.

Launches one on the demo's policy (a minute on two cores; `make sglang` first), asks it the cases below and writes one
small JSON file for each: `request` (method, path, body), `status`, `answer` (parsed JSON, or text). The fake server is
held to these files, so they are made anew when SGLang's version changes. No key and no path of this machine is in them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from moerl.errors import MoerlError
from moerl.rollout.sglang.arguments import SglangServerConfig
from moerl.rollout.sglang.servers import Server, SglangServers

ROOT = Path(__file__).resolve().parent.parent
POLICY = ROOT / "configs" / "demo" / "policy"
PROMPT = [11, 14, 10, 15, 9, 14, 13, 18, 21]
"""`7+6-5+9=?` in the demo's vocabulary."""
SERVER_INFO_KEYS = (
    *("version", "tp_size", "ep_size", "dp_size", "attn_dp_size", "enable_return_routed_experts", "weight_version"),
    *("max_total_num_tokens", "max_running_requests", "device", "dtype", "disable_radix_cache"),
)


def generate(rid: str, **options: Any) -> dict[str, Any]:
    """The body of one `/generate`, options of sampling under `sampling`."""
    sampling = {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 7} | options.pop("sampling", {})
    return {"rid": rid, "input_ids": PROMPT, "sampling_params": sampling} | options


LONG = {"max_new_tokens": 200, "ignore_eos": True}
ROUTES = {"return_logprob": True, "return_routed_experts": True}
CASES: dict[str, tuple[str, str, Any]] = {
    "plain": ("POST", "/generate", generate("r-plain")),
    "logprobs": ("POST", "/generate", generate("r-logprobs", return_logprob=True)),
    "logprobs_cold": ("POST", "/generate", generate("r-cold", return_logprob=True, sampling={"temperature": 0.7})),
    "input_logprobs": ("POST", "/generate", generate("r-input", return_logprob=True, logprob_start_len=0)),
    "greedy": ("POST", "/generate", generate("r-greedy", sampling={"temperature": 0.0}, **ROUTES)),
    "routes": ("POST", "/generate", generate("r-routes", **ROUTES)),
    "routes_from_prompt": (
        "POST",
        "/generate",
        generate("r-start", routed_experts_start_len=len(PROMPT), **ROUTES),
    ),
    "length_one": ("POST", "/generate", generate("r-one", sampling={"max_new_tokens": 1}, **ROUTES)),
    "stop_eos": ("POST", "/generate", generate("r-eos", sampling={"max_new_tokens": 60, "temperature": 0.0}, **ROUTES)),
    "stop_token": ("POST", "/generate", generate("r-stop", sampling={"stop_token_ids": list(range(2, 38))}, **ROUTES)),
    "length": ("POST", "/generate", generate("r-length", sampling={"ignore_eos": True}, **ROUTES)),
    "support": (
        "POST",
        "/generate",
        generate("r-support", return_logprob=True, return_sampling_mask=True, sampling={"top_k": 5, "top_p": 0.9}),
    ),
    "batch": (
        "POST",
        "/generate",
        {
            "rid": ["r-b0", "r-b1"],
            "input_ids": [PROMPT, PROMPT[:4]],
            "sampling_params": {"max_new_tokens": 3},
            **ROUTES,
        },
    ),
    "several": ("POST", "/generate", generate("r-n", sampling={"n": 2, "max_new_tokens": 3}, return_logprob=True)),
    "unknown_option": ("POST", "/generate", generate("r-unknown", no_such_option=True)),
    "unknown_sampling": ("POST", "/generate", generate("r-400", sampling={"no_such_option": 1})),
    "bad_start": ("POST", "/generate", generate("r-bad-start", routed_experts_start_len=99, **ROUTES)),
    "bad_rank": ("POST", "/generate", generate("r-bad-rank", routed_dp_rank=3)),
    "support_without_top_k": (
        "POST",
        "/generate",
        generate("r-no-k", return_logprob=True, return_sampling_mask=True, sampling={"top_p": 0.9}),
    ),
    "too_long": ("POST", "/generate", generate("r-long") | {"input_ids": PROMPT * 40}),
    "health": ("GET", "/health", None),
    "model_info": ("GET", "/model_info", None),
    "server_info": ("GET", "/server_info", None),
    "checksum": ("POST", "/weights_checker", {"action": "checksum"}),
    "begin": ("POST", "/begin_weight_update", {"selector": "all"}),
    "end": ("POST", "/end_weight_update", {}),
    "tensor_without_session": ("POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}),
    "disk": ("POST", "/update_weights_from_disk", {"model_path": str(POLICY), "weight_version": "1"}),
    "disk_absent": ("POST", "/update_weights_from_disk", {"model_path": "/no/such/folder"}),
    "flush": ("POST", "/flush_cache", {}),
    "pause_retract": ("POST", "/pause_generation", {"mode": "retract"}),
    "ready_paused": ("GET", "/ready", None),
    "continue": ("POST", "/continue_generation", {}),
    "abort_unknown": ("POST", "/abort_request", {"rid": "nobody"}),
    "unknown_endpoint": ("GET", "/no_such_endpoint", None),
}


def ask(server: Server, method: str, path: str, body: Any, *, with_key: bool = True) -> tuple[int, Any]:
    """(status, parsed JSON or text)."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    headers = {"Content-Type": "application/json"}
    if with_key and server.admin_key:
        headers["Authorization"] = f"Bearer {server.admin_key}"
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    try:
        return answer.status, json.loads(text)
    except json.JSONDecodeError:
        return answer.status, text


class Recorder:
    """Writes a file for each case."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server = server
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def record(self, name: str, method: str, path: str, body: Any, *, with_key: bool = True) -> None:
        """Ask and write."""
        status, answer = ask(self._server, method, path, body, with_key=with_key)
        if path == "/server_info":
            answer = {key: answer.get(key) for key in SERVER_INFO_KEYS}
        request = {"method": method, "path": path, "body": body}
        text = json.dumps({"request": request, "status": status, "answer": answer}, indent=1)
        text = text.replace(str(POLICY), "configs/demo/policy")
        for secret in (self._server.admin_key, str(ROOT)):
            if secret and secret in text:
                raise SystemExit(f"{name}: the answer holds the key or a path of this machine; leave that out")
        (self._folder / f"{name}.json").write_text(text + "\n")
        print(f"  {name}: {status}", flush=True)

    def record_interrupted(self, name: str, rid: str, method_path_body: tuple[str, str, Any]) -> None:
        """A long request that something else ends or holds while it runs."""
        body = generate(rid, sampling=LONG, **ROUTES)
        thread = threading.Thread(target=self.record, args=(name, "POST", "/generate", body))
        thread.start()
        time.sleep(3.0)
        self.record(f"{name}_call", *method_path_body)
        thread.join()

    def record_twice(self) -> None:
        """The same rid while it is alive."""
        body = generate("r-twice", sampling=LONG)
        threads = [
            threading.Thread(target=self.record, args=(f"same_rid_{i}", "POST", "/generate", body)) for i in range(2)
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.3)
        for thread in threads:
            thread.join()


def record_all(server: Server, folder: Path) -> None:
    """Every case."""
    recorder = Recorder(server, folder)
    for name, (method, path, body) in CASES.items():
        recorder.record(name, method, path, body)
    recorder.record("without_key", "POST", "/generate", generate("r-no-key"), with_key=False)
    recorder.record("model_info_without_key", "GET", "/model_info", None, with_key=False)
    recorder.record_interrupted("abort", "r-abort", ("POST", "/abort_request", {"rid": "r-abort"}))
    recorder.record_interrupted("abort_pause", "r-pause", ("POST", "/pause_generation", {"mode": "abort"}))
    recorder.record("continue", "POST", "/continue_generation", {})
    recorder.record_twice()


def main() -> int:
    """Exit status 0, or 1 with one message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="auto", help="of the servers' environment (default: .venv-sglang)")
    parser.add_argument("--tensor", type=int, default=1, help="tensor and expert parallel ranks (default %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "data" / "sglang", help="folder to write")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = SglangServerConfig(
        python=options.python,
        tensor=options.tensor,
        expert=options.tensor,
        dtype="float32",
        max_total_tokens=4096,
        max_running_requests=8,
    )
    try:
        with tempfile.TemporaryDirectory() as logs:
            servers = SglangServers(config, model_path=POLICY, log_folder=Path(logs), returns_routes=True)
            servers.start()
            try:
                record_all(servers.servers[0], options.out / f"tp{options.tensor}")
            finally:
                servers.stop()
    except MoerlError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
