"""Level 2: a real SGLang server ends at stop strings, however they are spelled, and episodes call a tool over one."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from sglang_talk import Talk

from moerl.build import build_run
from moerl.configure import load
from moerl.loop import train
from moerl.reference.sampling import Sampler
from moerl.rollout.engine import ServedModel
from moerl.rollout.engines.sglang_engine import SglangEngine, SglangEngineConfig
from moerl.types import SamplingParams
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo"
POLICY = DEMO / "policy"
PROMPT = [11, 14, 10, 15, 9, 14, 13, 18, 21, 11, 14, 10, 18]
"""`7+6-5+9=?7+6=`, after which the greedy answer is `13,13-5=8,8+9=17\\boxed{17}`."""
TOLERANCE = 5e-5
SPARE = 29
"""A token that the demo's policy never writes."""

pytestmark = pytest.mark.slow


def said(**fields):
    """Greedy, as a server without deterministic inference draws otherwise in every batch."""
    return SamplingParams(20, temperature=0.0, **fields)


@pytest.fixture(scope="module")
def spelled():
    """The text of five tokens amid the greedy answer, and that answer up to their end."""
    [got] = Sampler(POLICY).generate([np.array(PROMPT)], [SamplingParams(20, temperature=0.0)])
    text = "".join(words_of(POLICY)[token] for token in got.token_ids[3:8].tolist())
    assert text == "13-5="
    return text, got.token_ids[:8].tolist()


@pytest.fixture(scope="module")
def folder(spelled, tmp_path_factory):
    """The demo's policy with a tokenizer that writes those five as one, which its policy does not."""
    folder = tmp_path_factory.mktemp("model") / "policy"
    shutil.copytree(POLICY, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {w: n for w, n in vocabulary.items() if n != SPARE} | {spelled[0]: SPARE}
    tokenizer["pre_tokenizer"]["pattern"]["Regex"] = re.escape(spelled[0]) + "|\\\\boxed\\{|."
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def words_of(folder):
    """Token -> its text; that of an answer is theirs, one after the other."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return {number: text for text, number in vocabulary.items()}


@pytest.fixture(scope="module")
def engine(python, folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    servers = {"python": str(python), "dtype": "float32", "max_total_tokens": 4096, "max_running_requests": 8}
    cfg = SglangEngineConfig(servers=servers, precision="fp32")
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    model = ServedModel(folder, run, vocab_size, None, wants_routes=False)
    sender = DiskSender(DiskConfig(check_every=0), SenderPlace(run / "engine_weights", folder))
    engine = SglangEngine(cfg, served_model=model, sender=sender)
    try:
        yield engine
    finally:
        engine.close()


def answers(engine, *params):
    """To the prompt, one for each of `params`, all at once."""

    async def ask():
        prompt = np.array(PROMPT, dtype=np.int32)
        return await asyncio.gather(*(engine.generate(prompt, one, f"p{i}/0#0") for i, one in enumerate(params)))

    return asyncio.run(ask())


def test_an_answer_ends_at_the_token_that_completes_a_stop_string(engine, folder):
    """That token is kept. The string lies over several, or in the prompt alone, and may end in the budget's last."""
    words = words_of(folder)
    [whole] = answers(engine, said())
    ids = whole.token_ids.tolist()
    assert len(ids) > 6
    texts = list(accumulate(words[token] for token in ids))
    stops = ["".join(words[token] for token in ids[first : first + 3]) for first in (0, len(ids) // 2, len(ids) - 3)]
    ends = [next(i for i, text in enumerate(texts) if stop in text) + 1 for stop in stops]
    got = answers(engine, *(said(stop_strings=("((((", stop)) for stop in stops))
    for end, one in zip(ends, got, strict=True):
        assert (one.finish_reason, one.token_ids.tolist()) == ("stop", ids[:end])
        np.testing.assert_allclose(one.logprobs, whole.logprobs[:end], atol=TOLERANCE)
    last = SamplingParams(ends[1], temperature=0.0, stop_strings=(stops[1],))
    asked = "".join(words[token] for token in PROMPT)
    at_the_budget, of_the_prompt = answers(engine, last, said(stop_strings=(asked,)))
    assert (at_the_budget.finish_reason, at_the_budget.token_ids.tolist()) == ("stop", ids[: ends[1]])
    assert (of_the_prompt.finish_reason, of_the_prompt.token_ids.tolist()) == (whole.finish_reason, ids)


def test_what_the_reader_goes_by(engine, spelled):
    """The text ends with the stop string, the reason names it, and of tokens none is cut off."""
    body = {"input_ids": PROMPT, "return_logprob": True}
    sampling = {"max_new_tokens": 20, "temperature": 0.0, "no_stop_trim": True, "skip_special_tokens": False}
    short = spelled[0][:2]
    got = Talk(engine._found[0]).ok("/generate", **body, sampling_params=sampling | {"stop": [short]})
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": short}
    assert got["text"].endswith(short)
    assert len(got["output_ids"]) == got["meta_info"]["completion_tokens"]


def test_a_stop_string_in_another_spelling_ends_the_answer_too(engine, spelled):
    """Alone, SGLang looks at as many tokens as it writes the string with, and one more: here at 2 of the 5."""
    stop, ids = spelled
    [got] = answers(engine, said(stop_strings=(stop,)))
    assert (got.finish_reason, got.token_ids.tolist()) == ("stop", ids)
    sampling = {"max_new_tokens": 20, "temperature": 0.0, "stop": [stop]}
    alone = Talk(engine._found[0]).ok("/generate", input_ids=PROMPT, sampling_params=sampling)
    assert stop in alone["text"]
    assert len(alone["output_ids"]) > len(ids)


def test_episodes_call_a_tool(python, tmp_path):
    """As in `tests/e2e/test_tools.py`: the box counts as the call, and ends the turn, since it is a stop string."""
    tool = (
        "rollout.environment={name: tool_use, tools: [{name: calculator}], call_open: '\\boxed{', call_close: '}', "
        "body: argument, results: text, result_close: ';', error_text: '?', max_turns: 3, scored: all}"
    )
    small = ["run.num_steps=1", "rollout.prompts_per_step=2", "rollout.group_size=8", "batch.num_minibatches=1"]
    quiet = ["telemetry.report=false", "telemetry.progress=off", "telemetry.probe_prompts=0"]
    kept = ["checkpoint.interval_steps=0", "checkpoint.export_hf=false", "algorithm.routing=R3"]
    place = [f"rollout.engine.servers.python={python}", f"run.output_dir={tmp_path}", "run.name=tools"]
    run = build_run(load(str(DEMO / "gspo_sglang.yaml"), [tool, *small, *quiet, *kept, *place]))
    assert run is not None
    taken, take = [], run.rooms.rollouts.take

    def seen(step, version):
        groups, metrics = take(step, version)
        taken.extend(one for group in groups for one in group.trajectories)
        return groups, metrics

    run.rooms.rollouts.take = seen
    try:
        train(run.rooms, run.schedule, run.resume_from)
    finally:
        run.close()
    [_, row] = [json.loads(line) for line in (tmp_path / "tools" / "metrics.jsonl").read_text().splitlines()]
    assert len(taken) == 16
    assert row["rollout/errors"] == row["rollout/aborted"] == row["engine/bad_answers"] == 0
    assert row["rollout/tool_calls"] > 0.5
    assert row["rollout/tool_result_tokens"] > 0
    assert row["engine/completions"] == 16 * row["rollout/tool_turns"] > 24
    assert row["route/replay_coverage"] == 1
    assert row["mm/logp_abs_max"] < TOLERANCE
    words, close = words_of(POLICY), 3
    assert words[close] == "}"
    for one in (one for one in taken if one.metrics["tool_turns"] > 1):
        starts = np.flatnonzero(np.diff(one.loss_mask.astype(int)) == -1)
        assert one.token_ids[starts[0]] == close, "the first turn ends with the token of its stop string"
        added = one.token_ids[len(one.token_ids) - one.loss_mask[::-1].argmin() - 1]
        assert words[int(added)] == ";", "the last turn goes on from a tool's answer"
