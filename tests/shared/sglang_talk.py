"""What level 2 asks a real SGLang server with: plain HTTP, and the plain-torch model that its answers are held to."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch

from moerl.reference.model import ReferenceModel

LAYERS, TOP_K = 2, 2
_NUMBERS = itertools.count()


def kill(server):
    """SIGKILL to the server's own process, found by its port."""
    port = server.url.rpartition(":")[2]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "sglang.launch_server" in line and f"--port {port} " in line:
            os.kill(int(folder.name), signal.SIGKILL)
            return
    raise AssertionError(f"no server at port {port}")


@dataclass
class Answer:
    """One completion as arrays."""

    ids: list[int]
    logprobs: np.ndarray
    routes: np.ndarray
    meta: dict

    @classmethod
    def of(cls, body):
        meta = body["meta_info"]
        pairs = meta["output_token_logprobs"]
        assert [pair[1] for pair in pairs] == body["output_ids"]
        raw = np.frombuffer(base64.b64decode(meta["routed_experts"], validate=True), dtype="<i4")
        return cls(body["output_ids"], np.array([p[0] for p in pairs]), raw.reshape(-1, LAYERS, TOP_K), meta)


class Talk:
    """To one server."""

    def __init__(self, server):
        self.server = server

    def call(self, path, body=None, *, method="POST", key=True, seconds=120):
        """(status, parsed JSON or text)."""
        parts = urlsplit(self.server.url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {self.server.admin_key}"
        try:
            connection.request(method, path, json.dumps(body or {}) if method == "POST" else None, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except json.JSONDecodeError:
            return answer.status, text

    def ok(self, path, **body):
        """The answer of a call that must succeed."""
        status, answer = self.call(path, body)
        assert status == 200, (path, status, answer)
        return answer

    def generate(self, prompt, *, rid=None, options=None, **sampling):
        """One completion with logprobs and routes."""
        body = {
            "rid": rid or f"t{next(_NUMBERS)}-",
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 16, "temperature": 1.0} | sampling,
            "return_logprob": True,
            "return_routed_experts": True,
        }
        return Answer.of(self.ok("/generate", **(body | (options or {}))))

    def begin(self, prompt, **options):
        """Start one in a thread -> a function that waits for its answer."""
        box = []
        thread = threading.Thread(target=lambda: box.append(self.generate(prompt, **options)), daemon=True)
        thread.start()

        def finish():
            thread.join(timeout=120)
            assert box, "no answer"
            return box[0]

        return finish

    def flush(self):
        self.ok("/flush_cache")

    def load(self, folder, version, **options):
        """From disk."""
        answer = self.ok("/update_weights_from_disk", model_path=str(folder), weight_version=str(version), **options)
        assert answer["success"] is True

    def checksum(self):
        """Of every rank's tensors, by their internal names."""
        return [rank["checksums"] for rank in self.ok("/weights_checker", action="checksum")["ranks"]]


class Oracle:
    """moerl's plain-torch model of a folder, in float32."""

    def __init__(self, folder: Path):
        self.model = ReferenceModel.from_pretrained(folder)

    @torch.no_grad()
    def __call__(self, ids, temperature=1.0):
        """(log-probabilities [t, v] of the next token, routes [t, l, k])."""
        tokens = torch.tensor(ids)
        out = self.model.forward_packed(tokens, torch.tensor([0, len(ids)]))
        return (out.logits.double() / temperature).log_softmax(-1).numpy(), out.own_routes.numpy()

    def gaps(self, prompt, answer, temperature=1.0, first=0):
        """|server - oracle| of the logprobs of the completion's tokens from `first` on."""
        table, _ = self(prompt + answer.ids, temperature)
        places = range(len(prompt) - 1 + first, len(prompt) + len(answer.ids) - 1)
        expected = np.array([table[place, token] for place, token in zip(places, answer.ids[first:], strict=True)])
        return np.abs(expected - answer.logprobs[first:])
