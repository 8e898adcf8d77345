"""`moerl fake-engine` in a process of its own: its URL, its faults, its end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from moerl.__main__ import main

ROOT = Path(__file__).resolve().parents[3]
ASKED = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 5}}
SECONDS = 120
"""Far above what a start takes."""


def status_and_answer(url):
    """Of one completion."""
    body, headers = json.dumps(ASKED).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/generate", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, None


def test_it_says_where_it_is_commits_its_faults_and_ends_well(tmp_path):
    rules = tmp_path / "faults.json"
    rules.write_text(json.dumps([{"kind": "status", "status": 503}]))
    line = ["fake-engine", "--port", "0", "--vocab-size", "20", "--lengths", "fixed:6", "--faults", f"@{rules}"]
    with subprocess.Popen(
        [sys.executable, "-m", "moerl", *line], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), "the first line"
            assert status_and_answer(url) == (503, None)
            status, answer = status_and_answer(url)
            assert (status, len(answer["output_ids"])) == (200, 4), "as long as --lengths says, less the prompt"
            assert max(answer["output_ids"]) < 20
            process.send_signal(signal.SIGINT)
            rest, err = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert (process.returncode, rest) == (0, "")
    assert "Traceback" not in err


FAULTS = {
    "no JSON": ("[{", "--faults is '[{', but must be a JSON list or @FILE of one"),
    "no such file": ("@/no/such/file", "--faults is '@/no/such/file', but must be a JSON list or @FILE of one"),
    "no list": ('{"kind": "slow"}', "faults must be a list of objects such as"),
    "no such kind": ('[{"kind": "slowly"}]', "fault kind 'slowly' is none of status, slow, hang"),
    "no such field": ('[{"kind": "slow", "time": 3}]', "a fault has the unknown fields time; known: after, count"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_that_are_none_are_said(capsys, name):
    given, message = FAULTS[name]
    assert main(["fake-engine", "--port", "0", "--faults", given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"moerl: {message}")
