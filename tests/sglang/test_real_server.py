"""Level 2: a real SGLang server on this machine, TP1 and TP2 x EP2, in float32, against moerl's plain-torch model.

What SGLang 0.5.23 does is written down here where moerl relies on it, pitfalls included: if a later version does
otherwise, the test that says so fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_talk import Oracle, Talk

from moerl.rollout.sglang.arguments import SglangServerConfig
from moerl.rollout.sglang.servers import SglangServers, is_healthy

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "configs" / "demo" / "policy"
PROMPT = [11, 14, 10, 15, 9, 14, 13, 18, 21]
PROMPTS = [PROMPT, [9, 14, 5, 15, 10, 18, 21], [2, 5], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] * 6]
TOLERANCE = 5e-5
"""Of a logprob in float32; the largest gap seen was a fifth of it, 1.0e-5 (TP2 x EP2, T=0.7)."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2xep2"])
def servers(request, python, tmp_path_factory):
    config = SglangServerConfig(
        python=str(python),
        tensor=request.param,
        expert=request.param,
        dtype="float32",
        max_total_tokens=4096,
        max_running_requests=8,
    )
    folder = tmp_path_factory.mktemp("logs")
    servers = SglangServers(config, model_path=POLICY, log_folder=folder, returns_routes=True)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()


@pytest.fixture
def talk(servers):
    """Serving the first policy at full speed, with an empty cache."""
    talk = Talk(servers.servers[0])
    talk.ok("/slow_down", forward_sleep_time=None)
    if talk.call("/model_info", method="GET")[1]["weight_version"] != "0":
        talk.load(POLICY, 0)
    talk.flush()
    return talk


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A second policy: the first with noise in every matrix."""
    folder = tmp_path_factory.mktemp("other")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(POLICY / name, folder)
    torch.manual_seed(0)
    weights = {
        name: (tensor.float() + 0.1 * torch.randn(tensor.shape)).to(tensor.dtype) if tensor.dim() > 1 else tensor
        for name, tensor in load_file(POLICY / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def oracle():
    return Oracle(POLICY)


@pytest.fixture(scope="module")
def other_oracle(other):
    return Oracle(other)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_behaviour_policys(talk, oracle, temperature, record_property):
    gaps, raw = [], []
    for prompt in PROMPTS:
        answer = talk.generate(prompt, temperature=temperature, max_new_tokens=24, ignore_eos=True)
        assert len(answer.ids) == 24
        gaps.append(oracle.gaps(prompt, answer, temperature))
        raw.append(oracle.gaps(prompt, answer))
    gaps = np.concatenate(gaps)
    print(f"\nlogprob gap at T={temperature}: max {gaps.max():.1e}, mean {gaps.mean():.1e} of {gaps.size} tokens")
    assert gaps.max() < TOLERANCE
    if temperature != 1.0:
        assert np.concatenate(raw).max() > 0.1, "the temperature is inside"


def test_logprobs_of_a_prompt_have_no_temperature(talk, oracle):
    options = {"logprob_start_len": 0}
    answer = talk.generate(PROMPT, temperature=0.7, options=options)
    given = answer.meta["input_token_logprobs"]
    assert given[0][0] is None
    table, _ = oracle(PROMPT)
    expected = [table[place, token] for place, token in enumerate(PROMPT[1:])]
    np.testing.assert_allclose([pair[0] for pair in given[1:]], expected, atol=TOLERANCE)


def test_routes_are_the_routers(talk, oracle):
    same = []
    for prompt in PROMPTS:
        answer = talk.generate(prompt, max_new_tokens=24, ignore_eos=True)
        ids = prompt + answer.ids
        assert len(answer.routes) == len(ids) - 1, "the last token has none"
        same.append(answer.routes == oracle(ids)[1][:-1])
    agreement = np.concatenate(same).mean()
    print(f"\nroutes equal, in order: {agreement:.4%} of {np.concatenate(same).size}")
    assert agreement == 1.0


def test_greedy_takes_the_likeliest(talk, oracle):
    answer = talk.generate(PROMPT, temperature=0.0)
    table, _ = oracle(PROMPT + answer.ids)
    assert answer.ids == table[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert oracle.gaps(PROMPT, answer).max() < TOLERANCE


@pytest.mark.parametrize("start", [0, 4, len(PROMPT)])
def test_routes_from_a_start(talk, oracle, start):
    answer = talk.generate(PROMPT, max_new_tokens=5, ignore_eos=True, options={"routed_experts_start_len": start})
    assert len(answer.routes) == len(PROMPT) + 5 - 1 - start
    np.testing.assert_array_equal(answer.routes, oracle(PROMPT + answer.ids)[1][start:-1])


def test_one_token_has_the_prompts_routes(talk, oracle):
    answer = talk.generate(PROMPT, max_new_tokens=1)
    assert len(answer.routes) == len(PROMPT)
    assert answer.meta["finish_reason"]["type"] == ("stop" if answer.ids == [1] else "length")


def test_a_stop_token_is_kept(talk):
    answer = talk.generate(PROMPT, temperature=0.0, max_new_tokens=60)
    assert answer.meta["finish_reason"] == {"type": "stop", "matched": 1}
    assert answer.ids[-1] == 1


def test_a_prefix_comes_from_the_cache_with_its_routes(talk, oracle):
    first = talk.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
    assert first.meta["cached_tokens"] == 0
    turn = PROMPT + first.ids + [5, 6]
    second = talk.generate(turn, max_new_tokens=8, ignore_eos=True)
    assert second.meta["cached_tokens"] >= len(PROMPT) + 7
    np.testing.assert_array_equal(second.routes[: len(first.routes)], first.routes)
    np.testing.assert_array_equal(second.routes, oracle(turn + second.ids)[1][:-1])
    assert oracle.gaps(turn, second).max() < TOLERANCE
    talk.flush()
    assert talk.generate(turn, max_new_tokens=1).meta["cached_tokens"] == 0


def running(talk, *rids):
    """Long completions that are under way, for ten seconds at least."""
    talk.ok("/slow_down", forward_sleep_time=0.05)
    finishes = [talk.begin(PROMPT, rid=rid, max_new_tokens=200, ignore_eos=True) for rid in rids]
    time.sleep(2.0)
    return finishes


def test_an_abort_answers_with_what_there_is(talk, oracle):
    (finish,) = running(talk, "abort-me")
    talk.ok("/abort_request", rid="abort-me")
    answer = finish()
    assert answer.meta["finish_reason"]["type"] == "abort"
    assert 0 < len(answer.ids) == len(answer.logprobs) < 200
    assert len(answer.routes) == len(PROMPT) + len(answer.ids) - 1
    assert oracle.gaps(PROMPT, answer).max() < TOLERANCE


def test_an_abort_takes_every_rid_that_begins_so(talk):
    one, two = running(talk, "prefix-1", "prefix-12")
    talk.ok("/abort_request", rid="prefix-1")
    assert {one().meta["finish_reason"]["type"], two().meta["finish_reason"]["type"]} == {"abort"}


def test_pause_abort_then_update(talk, oracle, other, other_oracle):
    (finish,) = running(talk, "pause-abort")
    talk.ok("/pause_generation", mode="abort")
    partial = finish()
    waiting = talk.begin(PROMPT, max_new_tokens=8, ignore_eos=True)
    talk.load(other, 1, keep_pause=True)
    talk.flush()
    talk.ok("/continue_generation")
    after = waiting()
    assert partial.meta["finish_reason"]["type"] == "abort"
    assert oracle.gaps(PROMPT, partial).max() < TOLERANCE
    np.testing.assert_array_equal(partial.routes, oracle(PROMPT + partial.ids)[1][:-1])
    assert after.meta["weight_versions"] == [{"version": "1", "start": 0, "end": 8}]
    assert other_oracle.gaps(PROMPT, after).max() < TOLERANCE
    np.testing.assert_array_equal(after.routes, other_oracle(PROMPT + after.ids)[1][:-1])


def spans(answer):
    (first, second) = answer.meta["weight_versions"]
    assert (first["version"], second["version"]) == ("0", "1")
    assert (first["start"], second["end"]) == (0, len(answer.ids))
    assert first["end"] == second["start"]
    return first["end"]


def test_pause_retract_recomputes_everything_with_the_new_weights(talk, oracle, other, other_oracle):
    """So the routes of the earlier span are the new policy's while its logprobs are the old one's (pitfall 21)."""
    (finish,) = running(talk, "pause-retract")
    talk.ok("/pause_generation", mode="retract")
    talk.load(other, 1, flush_cache=False)
    talk.flush()
    talk.ok("/continue_generation")
    answer = finish()
    change = spans(answer)
    assert answer.meta["num_retractions"] > 0
    assert oracle.gaps(PROMPT, answer)[:change].max() < TOLERANCE
    assert other_oracle.gaps(PROMPT, answer, first=change).max() < TOLERANCE
    np.testing.assert_array_equal(answer.routes, other_oracle(PROMPT + answer.ids)[1][:-1])


def test_pause_in_place_goes_on_from_the_old_cache(talk, oracle, other, other_oracle):
    """Later tokens are sampled by new weights over keys and values of old ones: neither policy's logprobs."""
    (finish,) = running(talk, "pause-in-place")
    talk.ok("/pause_generation", mode="in_place")
    assert talk.call("/flush_cache")[0] == 400, "something runs"
    talk.load(other, 1, flush_cache=False)
    talk.ok("/continue_generation")
    answer = finish()
    change = spans(answer)
    assert answer.meta["num_retractions"] == 0
    assert oracle.gaps(PROMPT, answer)[:change].max() < TOLERANCE
    old_rows = len(PROMPT) + change - 1
    np.testing.assert_array_equal(answer.routes[:old_rows], oracle(PROMPT + answer.ids)[1][:old_rows])
    assert other_oracle.gaps(PROMPT, answer, first=change).max() > TOLERANCE


def test_an_update_from_disk_equals_a_load(talk, other, other_oracle):
    before = talk.checksum()
    talk.load(other, 7)
    changed = talk.checksum()
    assert changed != before
    assert talk.call("/model_info", method="GET")[1]["weight_version"] == "7"
    assert other_oracle.gaps(PROMPT, talk.generate(PROMPT)).max() < TOLERANCE
    talk.load(POLICY, 0)
    assert talk.checksum() == before


def test_a_folder_that_is_not_there_keeps_the_old_weights(talk, oracle):
    before = talk.checksum()
    status, answer = talk.call("/update_weights_from_disk", {"model_path": "/no/such/folder", "weight_version": "9"})
    assert (status, answer["success"]) == (400, False)
    assert talk.checksum() == before
    assert oracle.gaps(PROMPT, talk.generate(PROMPT)).max() < TOLERANCE


def test_a_seed_changes_nothing_without_deterministic_inference(talk):
    """SGLang reads `sampling_seed` only with --enable-deterministic-inference, which needs a GPU."""
    answers = {tuple(talk.generate(PROMPT, sampling_seed=3, max_new_tokens=24, ignore_eos=True).ids) for _ in range(4)}
    assert len(answers) > 1


def test_a_misspelt_option_is_ignored_and_a_misspelt_sampling_option_is_not(talk):
    talk.generate(PROMPT, max_new_tokens=1, options={"no_such_option": True})
    body = {"input_ids": PROMPT, "sampling_params": {"no_such_option": 1}}
    assert talk.call("/generate", body)[0] == 400


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/generate", "POST"),
        ("/server_info", "GET"),
        ("/model_info", "GET"),
        ("/pause_generation", "POST"),
        ("/update_weights_from_disk", "POST"),
        ("/abort_request", "POST"),
        ("/flush_cache", "POST"),
    ],
)
def test_everything_but_health_asks_for_the_key(talk, path, method):
    assert talk.call(path, method=method, key=False)[0] == 401


def test_the_key_is_not_in_the_log(servers):
    server = servers.servers[0]
    log = server.log_path.read_text()
    assert "'admin_api_key': '<key>'" in log, "SGLang writes its arguments there"
    assert server.admin_key not in log


def process_table():
    """Id -> (parent, command line) of what this user may see; processes that end meanwhile are left out."""
    table = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            table[int(folder.name)] = (int((folder / "stat").read_text().rpartition(")")[2].split()[1]), line)
    return table


def processes_of(servers, name):
    """Ids of this server's process (`main`), or of those of its own whose title has `name`."""
    table, port = process_table(), servers.servers[0].url.rpartition(":")[2]
    (main,) = [pid for pid, (_, line) in table.items() if "sglang.launch_server" in line and f"--port {port} " in line]
    return (
        [main] if name == "main" else [pid for pid, (parent, line) in table.items() if parent == main and name in line]
    )


def test_a_killed_server_is_found_and_comes_back(servers, oracle, other):
    """A scheduler or the server itself, one in each layout: a restart takes as long as a start."""
    talk = Talk(servers.servers[0])
    talk.load(other, 5)
    victims = processes_of(servers, "main" if "--tp-size" in servers.command(0) else "scheduler")
    assert victims
    os.kill(victims[0], signal.SIGKILL)
    end = time.monotonic() + 120
    while not servers.dead():
        assert time.monotonic() < end
        time.sleep(0.2)
    print(f"\nfound after {120 - (end - time.monotonic()):.1f} s: {servers.dead()[0].splitlines()[0]}")
    assert not is_healthy(talk.server.url, seconds=5)
    servers.restart(0)
    assert servers.dead() == {}
    assert talk.call("/model_info", method="GET")[1]["weight_version"] == "0", "the folder's weights, honestly labelled"
    assert oracle.gaps(PROMPT, talk.generate(PROMPT)).max() < TOLERANCE
