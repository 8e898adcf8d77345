"""What surveys recommend around the losses, in real runs: templates compared before training and then trained with,
votes and best-of-k, metrics of the answers, the pass-rate table and re-filtering by it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

NAMES = ("none", "chat", "r1", "qwen_math")
EVALUATION = (
    "evaluation.num_samples=4",
    "evaluation.pass_at=[1,4]",
    "evaluation.maj_at=[1,3]",
    "evaluation.best_of=[1,4]",
)
LONG = ("data.max_prompt_tokens=600", "rollout.max_new_tokens=24")


def make_folder(demo, folder):
    """The demo's policy with a tokenizer that knows every printable character; of those it learned nothing."""
    shutil.copytree(demo, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    known = tokenizer["model"]["vocab"]
    words = dict.fromkeys([*sorted(known, key=known.__getitem__), *map(chr, range(32, 127)), "\n"])
    tokenizer["model"]["vocab"] = {word: i for i, word in enumerate(words)}
    tokenizer["pre_tokenizer"]["pattern"]["Regex"] += "|\\n"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    old, config["vocab_size"], config["max_position_embeddings"] = config["vocab_size"], len(words), 1024
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = weights[name]
        assert len(rows) == old
        weights[name] = torch.cat([rows, rows.new_zeros(len(words) - old, rows.shape[1])])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def templates(stage):
    folder = make_folder("configs/demo/policy", stage.moerl.folder / "ascii_policy")
    base = (str(stage.files.tiny), f"model.path={folder}", "evaluation.sets.0.limit=6", *EVALUATION, *LONG)
    compare = ("eval", *base, "--compare-templates", ",".join(NAMES))
    trained = stage.moerl.train(
        *base, "data.template=r1", "run.num_steps=2", "batch.max_tokens_per_microbatch=4096", name="trained_r1"
    )
    return {
        "json": stage.moerl.call(*compare, "--json"),
        "table": stage.moerl.call(*compare, "data.max_prompt_tokens=300"),
        "qwen_math": stage.moerl.call("eval", *base, "data.template=qwen_math", "--json"),
        "partly": stage.moerl.call(
            *compare[:-2], "data.max_prompt_tokens=448", "--compare-templates", "none,r1", "--json"
        ),
        "only r1": stage.moerl.call(*compare[:-2], "data.max_prompt_tokens=40", "--compare-templates", "r1"),
        "unknown": stage.moerl.call("eval", *base, "--compare-templates", "none,r2"),
        "trained": trained,
    }


REFILTER = ("data.refilter={every_steps: 2, low: 0.2, high: 0.7, return_after: 1}", "run.num_steps=5")


def refiltered(stage):
    """Once in one go, and once killed after its third step."""
    whole = stage.moerl.train(stage.files.tiny, *REFILTER, name="refiltered")
    folder = stage.moerl.folder / "refiltered_killed"
    process = stage.moerl.start(*stage.moerl.arguments(stage.files.tiny, *REFILTER, name=folder.name))
    while process.poll() is None and not (folder / "checkpoints" / "step_000003" / "manifest.json").is_file():
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    again = stage.moerl.train(stage.files.tiny, *REFILTER, "run.resume=required", name=folder.name)
    return whole, again


@pytest.mark.runs.with_args(templates)
def test_templates_are_compared_before_training(runs):
    found = json.loads(runs[templates]["json"].expect(0).stdout)
    values = found["values"]
    assert tuple(values) == tuple(sorted(NAMES))
    assert (found["refused"], found["num_prompts"], found["num_left_out"]) == ({}, 6, 0)
    assert found["extracts"] == {"none": ["boxed"], "chat": ["boxed"], "qwen_math": ["boxed"], "r1": ["answer_tag"]}
    assert values["none"] == values["chat"]  # the demo's chat template is the content alone
    assert values["none"]["eval/format_fraction_greedy"] == 1.0
    assert values["r1"]["eval/format_fraction_greedy"] == 0.0  # it never saw such words
    assert values["r1"] != values["qwen_math"]
    wanted = ("accuracy_greedy", "accuracy_sampled", "pass@4", "maj@3", "best_by_reward@4", "best_by_logprob@4")
    wanted += ("response_length_sampled", "truncated_fraction_sampled", "format_fraction_sampled")
    for one in values.values():
        assert {f"eval/{name}" for name in wanted} <= set(one)
        for name in ("pass@1", "maj@1", "best_by_reward@1", "best_by_logprob@1"):
            assert one[f"eval/{name}"] == pytest.approx(one["eval/accuracy_sampled"], abs=1e-12)


@pytest.mark.runs.with_args(templates)
def test_templates_are_compared_on_the_tasks_that_fit_all(runs):
    found = json.loads(runs[templates]["partly"].expect(0).stdout)
    assert set(found["values"]) == {"none", "r1"}
    assert 0 < found["num_left_out"] < 6
    assert found["num_prompts"] == 6 - found["num_left_out"]
    whole = json.loads(runs[templates]["json"].stdout)["values"]
    assert found["values"]["none"] != whole["none"]  # of fewer tasks


@pytest.mark.runs.with_args(templates)
def test_a_template_is_the_same_in_comparison_evaluation_and_training(runs):
    values = json.loads(runs[templates]["json"].expect(0).stdout)["values"]
    assert json.loads(runs[templates]["qwen_math"].expect(0).stdout) == values["qwen_math"]
    trained = runs[templates]["trained"].expect(0)
    start = {name: value for name, value in trained.rows[0].items() if name.startswith("eval/")}
    assert start == values["r1"]
    assert len(trained.rows) == 3


@pytest.mark.runs.with_args(templates)
def test_the_comparison_is_a_table_that_says_what_does_not_fit(runs):
    table = runs[templates]["table"].expect(0).stdout
    rows = ("answer read in", "accuracy greedy", "pass@4", "maj@3", "best by reward@4", "format fraction sampled")
    for word in (*NAMES, *rows):
        assert word in table
    assert "6 held-out tasks" in " ".join(table.split())  # of the title, which a long path makes wrap
    assert "r1 cannot be used: data set 'heldout': 6 of 6 prompts are longer than data.max_prompt_tokens=300" in table
    alone = runs[templates]["only r1"].expect(2)
    assert "none of the templates can be used" in alone.stderr
    unknown = runs[templates]["unknown"].expect(2)
    assert "no prompt template is called 'r2'" in unknown.stderr
    for outcome in (alone, unknown):
        assert "Traceback" not in outcome.output


@pytest.mark.runs.with_args("tiny")
def test_every_step_says_what_its_answers_are_like(runs):
    names = ("rollout/distinct_2", "rollout/distinct_4", "rollout/distinct_fraction", "rollout/token_prob")
    names += ("rollout/token_logprob", "rollout/reflection_fraction", "rollout/reflection_words", "reward/group_std")
    names += ("reward/group_range", "rollout/truncated_fraction", "rollout/response_length_wrong", "pg/entropy")
    rows = runs["tiny"].rows[1:]
    for row in rows:
        assert set(names) <= set(row)
        for name in ("rollout/distinct_2", "rollout/distinct_4", "rollout/distinct_fraction", "rollout/token_prob"):
            assert 0 < row[name] <= 1
        assert row["reward/group_std"] <= row["reward/group_range"]
    assert any("rollout/response_length_right" in row for row in rows)


@pytest.mark.runs.with_args("tiny")
def test_the_pass_rate_table_has_every_group_of_every_step(runs):
    run = runs["tiny"]
    table = [json.loads(line) for line in (run.folder / "pass_rates.jsonl").read_text().splitlines()]
    assert Counter(row["step"] for row in table) == dict.fromkeys(range(1, 7), 4)
    for row in run.rows[1:]:
        visits = [one for one in table if one["step"] == row["step"]]
        passed, answers = sum(one["passed"] for one in visits), sum(one["answers"] for one in visits)
        assert passed / answers == pytest.approx(row["reward/mean"])  # the demo's rewards are 0 and 1


@pytest.mark.runs.with_args(refiltered)
def test_re_filtering_goes_by_the_table_and_survives_a_kill(runs):
    whole, again = (run.expect(0) for run in runs[refiltered])
    for name in ("samples.jsonl", "pass_rates.jsonl", "hf/model.safetensors"):
        assert (whole.folder / name).read_bytes() == (again.folder / name).read_bytes(), name
    data = [{k: v for k, v in row.items() if k.startswith(("data/", "reward/"))} for row in whole.rows]
    assert data == [{k: v for k, v in row.items() if k.startswith(("data/", "reward/"))} for row in again.rows]
    table = [json.loads(line) for line in (whole.folder / "pass_rates.jsonl").read_text().splitlines()]
    first = Counter()
    for row in table:
        if row["step"] < 2:
            first[row["prompt_id"]] += row["passed"] / row["answers"]
    out = {name for name, rate in first.items() if not 0.2 <= rate <= 0.7}
    assert out
    at_two = whole.rows[2]
    assert at_two["data/refilter_left_out"] == at_two["data/refilter_dropped"] == len(out)
    assert not out & {row["prompt_id"] for row in table if row["step"] in (2, 3)}
