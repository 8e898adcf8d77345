"""check_resume: what may and what may not differ between a run and its continuation."""

from __future__ import annotations

import dataclasses

import pytest

from moerl.config.load import as_dict, config_from_dict
from moerl.config.overlay import every_key
from moerl.config.resume import RESUME_MAY_CHANGE, RESUME_MUST_STAY, check_resume, config_differences, may_change
from moerl.errors import ConfigError
from moerl.rollout.engines.sglang_engine import SglangEngineConfig

VALUES = {
    "run": {"name": "demo", "num_steps": 10},
    "model": {"path": "m"},
    "data": {"train": [{"name": "a", "source": {"path": "a.jsonl"}}]},
    "optim": {"lr": 1e-4},
}


def config(**sections):
    values = {key: dict(value) for key, value in VALUES.items()}
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return as_dict(config_from_dict(values))


def test_nothing_changed():
    check_resume(config(), config())


def test_allowed_changes_pass():
    new = config(
        run={"num_steps": 20, "output_dir": "elsewhere", "resume": "required"},
        checkpoint={"keep": 5},
        telemetry={"report": False, "wandb": {"enabled": True}},
        evaluation={"interval_steps": 1},
        parallel={"tensor": 2, "expert": 2, "pipeline": 2, "timeout_seconds": 60.0, "overlap_grad_reduce": True},
        precision={"recompute": "full"},
        optim={"distributed": True},
    )
    check_resume(config(), new)


def test_servers_may_be_others():
    """A cluster gives a job that it starts again other hosts."""

    def served(**engine):
        return config(rollout={"engine": {"name": "sglang", **engine}})

    old = served(urls=["http://a:30000", "http://b:30000"], num_retries=5)
    check_resume(old, served(urls=["http://c:30000"], key_file="key", request_timeout_seconds=60.0, num_retries=9))
    check_resume(old, served(servers={"num_servers": 2}))
    check_resume(served(servers={"tensor": 2}), served(servers={"tensor": 4, "expert": 4}, no_server_seconds=1200.0))
    for fixed in ({"precision": "fp32"}, {"pause_mode": "retract"}, {"routes": "always"}, {"resume_aborted": False}):
        with pytest.raises(ConfigError, match=rf"rollout\.engine\.{next(iter(fixed))}"):
            check_resume(old, served(urls=["http://a:30000", "http://b:30000"], num_retries=5, **fixed))
    with pytest.raises(ConfigError, match=r"rollout\.engine\.name"):
        check_resume(old, config())


def test_refused_changes_are_all_listed_with_both_values():
    new = config(run={"num_steps": 20, "seed": 3}, optim={"lr": 1.0}, data={"train": [{"name": "b"}]})
    with pytest.raises(ConfigError) as caught:
        check_resume(config(), new)
    text = str(caught.value)
    for line in (
        "  run.seed: 0 in the run, 3 now",
        "  optim.lr: 0.0001 in the run, 1.0 now",
        "  data.train[0].name: 'a' in the run, 'b' now",
        "  data.train[0].source.path: 'a.jsonl' in the run, '(not set)' now",
        "May change on resume: run.name, run.num_steps",
        "run.resume=never",
    ):
        assert line in text
    assert "\n  run.num_steps" not in text


def test_the_probe_may_not_change_though_telemetry_may():
    with pytest.raises(ConfigError, match=r"telemetry\.probe_prompts: 8 in the run, 4 now"):
        check_resume(config(), config(telemetry={"probe_prompts": 4}))


def test_a_longer_run_may_not_move_the_end_of_the_decay():
    old = config(optim={"schedule": "linear"})
    longer = config(optim={"schedule": "linear"}, run={"num_steps": 20})
    with pytest.raises(
        ConfigError, match=r"optim\.decay_steps: 10 in the run, 20 now \(null follows run\.num_steps; set"
    ):
        check_resume(old, longer)
    check_resume(old, config(optim={"schedule": "linear", "decay_steps": 10}, run={"num_steps": 20}))


def test_the_steps_that_pretrain_a_critic_are_no_part_of_the_decay():
    """The policy's schedule counts its own updates: of ten steps, three for the critic, the last is the seventh."""
    critic = {"algorithm": {"critic": {"init": "policy", "pretrain_steps": 3}}}
    old = config(optim={"schedule": "linear"}, **critic)
    longer = {"run": {"num_steps": 20}, **critic}
    check_resume(old, config(optim={"schedule": "linear", "decay_steps": 7}, **longer))
    with pytest.raises(ConfigError, match=r"optim\.decay_steps: 7 in the run, 10 now"):
        check_resume(old, config(optim={"schedule": "linear", "decay_steps": 10}, **longer))
    with pytest.raises(ConfigError, match=r"optim\.decay_steps: 7 in the run, 17 now \(null follows"):
        check_resume(old, config(optim={"schedule": "linear"}, **longer))


def test_an_older_file_that_lacks_a_key_means_its_default():
    old = config()
    del old["optim"]["beta1"]
    check_resume(old, config())
    assert config_differences(old, config(optim={"beta1": 0.5})) == [("optim.beta1", 0.9, 0.5)]


def test_differences_see_list_lengths_and_types():
    assert config_differences({"a": [1]}, {"a": [1, 2]}) == [("a[1]", "(not set)", 2)]
    assert config_differences({"a": 1}, {"a": True}) == [("a", 1, True)]
    assert config_differences({"a": {"b": 1}}, {"a": {"b": 1}}) == []


def test_every_pattern_names_existing_keys():
    keys = [*every_key(), *(f"rollout.engine.{one.name}" for one in dataclasses.fields(SglangEngineConfig))]
    for pattern in (*RESUME_MAY_CHANGE, *RESUME_MUST_STAY):
        prefix = pattern.removesuffix("*")
        assert any(key == pattern or (pattern.endswith("*") and key.startswith(prefix)) for key in keys), pattern


@pytest.mark.parametrize(
    "key",
    ["algorithm.level", "algorithm.trust.low", "model.path", "run.seed", "rollout.group_size", "batch.num_minibatches"],
)
def test_what_makes_it_another_run_may_not_change(key):
    assert not may_change(key)
