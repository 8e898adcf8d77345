"""The run folder: when a run goes on, when it is set aside, and that two processes never share one."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from moerl.analysis.run_folder import CONFIG_FILE
from moerl.checkpoint import CheckpointStore
from moerl.config.load import as_dict, config_from_dict, read_values, resolved_yaml
from moerl.errors import CheckpointError, ConfigError
from moerl.rollout.sglang.arguments import SglangServerConfig
from moerl.rollout.sglang.servers import SglangServers
from moerl.run_folder import (
    CHECKPOINTS,
    find_checkpoint,
    folder_of,
    is_finished,
    lock,
    model_id,
    prepare,
    versions_folder,
)


class OneFilePolicy:
    """A learner that is one file."""

    def save(self, folder):
        (folder / "weights").write_bytes(b"w" * 100)


def config(tmp_path, *, on_corrupt="refuse", report=True, lr=1e-4, seed=0, **run):
    return config_from_dict(
        {
            "run": {"name": "demo", "num_steps": 10, "output_dir": str(tmp_path / "runs"), "seed": seed, **run},
            "model": {"path": "m"},
            "optim": {"lr": lr},
            "checkpoint": {"on_corrupt": on_corrupt},
            "telemetry": {"report": report},
        }
    )


def store_of(cfg):
    return CheckpointStore(folder_of(cfg) / CHECKPOINTS, keep=2, model_id="a" * 64)


def started(cfg, *steps):
    """A run of `cfg` with checkpoints of `steps`."""
    prepare(cfg, resumes=False)
    for step in steps:
        store_of(cfg).save(step, OneFilePolicy(), {"step": step})
    return folder_of(cfg)


def set_aside(cfg):
    folder = folder_of(cfg)
    return sorted(path for path in folder.parent.iterdir() if path.is_dir() and path != folder)


# Going on


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_nothing_there_starts_anew_and_writes_nothing(tmp_path, resume):
    cfg = config(tmp_path, resume=resume)
    assert find_checkpoint(cfg, store_of(cfg)) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("resume", ["auto", "required"])
def test_the_newest_checkpoint_is_found(tmp_path, resume):
    started(config(tmp_path), 3, 6)
    cfg = config(tmp_path, resume=resume)
    found = find_checkpoint(cfg, store_of(cfg))
    assert found is not None
    assert (found.step, found.loop_state()) == (6, {"step": 6})


def test_never_looks_at_no_checkpoint(tmp_path):
    started(config(tmp_path), 3)
    cfg = config(tmp_path, resume="never", seed=5)  # neither a changed seed nor damage matters to a new run
    (folder_of(cfg) / CHECKPOINTS / "step_000003" / "manifest.json").write_text("{")
    assert find_checkpoint(cfg, store_of(cfg)) is None


@pytest.mark.parametrize("has_folder", [False, True])
def test_required_without_a_checkpoint_says_where_it_looked(tmp_path, has_folder):
    if has_folder:
        started(config(tmp_path))
    cfg = config(tmp_path, resume="required")
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(cfg, store_of(cfg))
    assert str(caught.value) == f"run.resume=required, but {folder_of(cfg) / CHECKPOINTS} has no complete checkpoint"


def test_a_changed_configuration_names_the_keys_and_leaves_the_run_untouched(tmp_path):
    folder = started(config(tmp_path), 3)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    cfg = config(tmp_path, lr=1.0, seed=7, num_steps=20)
    with pytest.raises(ConfigError) as caught:
        find_checkpoint(cfg, store_of(cfg))
    lines = str(caught.value).splitlines()
    assert lines[0] == "the run cannot go on with another configuration:"
    assert lines[1:3] == ["  optim.lr: 0.0001 in the run, 1.0 now", "  run.seed: 0 in the run, 7 now"]
    assert lines[3].startswith("May change on resume: run.name, run.num_steps")
    assert lines[3].endswith("start anew with another run.name or run.resume=never.")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_longer_run_goes_on(tmp_path):
    started(config(tmp_path), 10)
    cfg = config(tmp_path, num_steps=20)
    found = find_checkpoint(cfg, store_of(cfg))
    assert found is not None
    assert found.step == 10


def test_a_changed_configuration_without_a_checkpoint_is_a_new_run(tmp_path):
    started(config(tmp_path))
    cfg = config(tmp_path, lr=1.0)
    assert find_checkpoint(cfg, store_of(cfg)) is None


def test_a_damaged_checkpoint_is_refused_or_passed_over_as_configured(tmp_path):
    folder = started(config(tmp_path), 3, 6)
    (folder / CHECKPOINTS / "step_000006" / "learner" / "weights").write_bytes(b"w" * 99)
    cfg = config(tmp_path)
    with pytest.raises(CheckpointError, match=r"99 bytes.*on_corrupt=previous goes on from step 3"):
        find_checkpoint(cfg, store_of(cfg))
    cfg = config(tmp_path, on_corrupt="previous")
    found = find_checkpoint(cfg, store_of(cfg))
    assert found is not None
    assert found.step == 3


def test_a_damaged_config_file_is_named(tmp_path):
    folder = started(config(tmp_path), 3)
    (folder / CONFIG_FILE).write_text("run: [")
    cfg = config(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(str(folder / CONFIG_FILE))):
        find_checkpoint(cfg, store_of(cfg))


# Making the folder


def test_a_new_folder_holds_the_resolved_configuration_and_no_leftover(tmp_path):
    cfg = config(tmp_path)
    folder = prepare(cfg, resumes=False)
    assert folder == tmp_path / "runs" / "demo"
    assert [path.name for path in folder.iterdir()] == [CONFIG_FILE]
    assert (folder / CONFIG_FILE).read_text() == resolved_yaml(cfg)
    assert read_values(folder / CONFIG_FILE) == as_dict(cfg)


def test_an_earlier_run_is_set_aside_whole(tmp_path, caplog):
    cfg = config(tmp_path)
    folder = started(cfg, 3)
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    before = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    prepare(config(tmp_path, seed=1), resumes=False)
    (aside,) = set_aside(cfg)
    assert re.fullmatch(r"demo\.before-\d{8}-\d{6}", aside.name)
    assert {str(path.relative_to(aside)): path.read_bytes() for path in aside.rglob("*") if path.is_file()} == before
    assert [path.name for path in folder.iterdir()] == [CONFIG_FILE]
    assert read_values(folder / CONFIG_FILE)["run"]["seed"] == 1
    assert f"set aside as {aside.name}" in caplog.text


def test_the_same_run_killed_before_its_first_checkpoint_begins_again_in_its_place(tmp_path, caplog):
    cfg = config(tmp_path, resume="auto")
    folder = started(cfg)
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    prepare(cfg, resumes=False)
    assert set_aside(cfg) == []
    assert [path.name for path in folder.iterdir()] == [CONFIG_FILE]
    assert "begins again" in caplog.text


def with_servers(folder):
    """What launched servers and the disk transport leave behind."""
    server = SglangServerConfig(num_servers=2, python=sys.executable)
    model = folder.parent.parent / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    logs = SglangServers(server, model_path=model, log_folder=folder, returns_routes=False, has_cuda=False).servers
    versions = ["engine_weights/0/model-00001.safetensors", "engine_weights/staging-1/model-00001.safetensors"]
    for path in [*(folder / name for name in versions), *(log.log_path for log in logs)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


def test_what_servers_left_of_a_killed_run_is_no_reason_to_set_it_aside(tmp_path):
    """Every kill would leave one more folder, with a model in it."""
    cfg = config(tmp_path, resume="auto")
    folder = started(cfg)
    with_servers(folder)
    prepare(cfg, resumes=False)
    assert set_aside(cfg) == []
    assert [path.name for path in folder.iterdir()] == [CONFIG_FILE]


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_run_that_is_set_aside_keeps_its_servers_logs_and_no_weights_on_their_way(tmp_path, resume):
    cfg = config(tmp_path, resume=resume)
    folder = started(cfg, 3)
    with_servers(folder)
    prepare(cfg, resumes=False)
    (aside,) = set_aside(cfg)
    assert sorted(path.name for path in aside.iterdir()) == [CHECKPOINTS, CONFIG_FILE, "sglang-0.log", "sglang-1.log"]
    assert (aside / CHECKPOINTS / "step_000003").is_dir()


def test_a_run_that_goes_on_keeps_its_servers_logs_and_no_weights_on_their_way(tmp_path):
    cfg = config(tmp_path)
    with_servers(started(cfg, 3))
    prepare(cfg, resumes=True)
    assert sorted(path.name for path in folder_of(cfg).iterdir()) == [
        CHECKPOINTS,
        CONFIG_FILE,
        "sglang-0.log",
        "sglang-1.log",
    ]


@pytest.mark.parametrize(
    "kept", ["hf/model.safetensors", "notes.txt", "batches/step_000001.npz", "sglang-mine.log", "sglang-0.log.gz"]
)
def test_what_is_more_than_records_is_set_aside(tmp_path, kept):
    cfg = config(tmp_path, resume="auto")
    folder = started(cfg)
    (folder / kept).parent.mkdir(exist_ok=True)
    (folder / kept).write_text("x")
    prepare(cfg, resumes=False)
    (aside,) = set_aside(cfg)
    assert (aside / kept).read_text() == "x"


def test_runs_set_aside_within_a_second_keep_apart(tmp_path):
    for seed in range(4):
        prepare(config(tmp_path, seed=seed), resumes=False)
    kept = [read_values(path / CONFIG_FILE)["run"]["seed"] for path in set_aside(config(tmp_path))]
    assert sorted(kept) == [0, 1, 2]


def test_a_folder_without_a_configuration_is_set_aside_too(tmp_path):
    cfg = config(tmp_path)
    folder_of(cfg).mkdir(parents=True)
    (folder_of(cfg) / "notes.txt").write_text("mine")
    prepare(cfg, resumes=False)
    assert (set_aside(cfg)[0] / "notes.txt").read_text() == "mine"


def test_an_empty_folder_is_just_used(tmp_path):
    cfg = config(tmp_path)
    folder_of(cfg).mkdir(parents=True)
    prepare(cfg, resumes=False)
    assert set_aside(cfg) == []


def test_going_on_keeps_everything_but_the_summary_and_takes_the_new_configuration(tmp_path):
    folder = started(config(tmp_path), 3)
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    (folder / "summary.json").write_text("{}")
    cfg = config(tmp_path, num_steps=20)
    prepare(cfg, resumes=True)
    assert set_aside(cfg) == []
    assert (folder / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert not (folder / "summary.json").exists()
    assert read_values(folder / CONFIG_FILE)["run"]["num_steps"] == 20
    assert store_of(cfg).steps() == [3]


def test_a_run_is_finished_once_its_summary_and_report_are_there(tmp_path):
    cfg, plain = config(tmp_path), config(tmp_path, report=False)
    folder = prepare(cfg, resumes=False)
    assert not is_finished(cfg)
    assert not is_finished(plain)
    (folder / "summary.json").write_text("{}")
    assert not is_finished(cfg)
    assert is_finished(plain)
    (folder / "report.html").write_text("<html>")
    assert is_finished(cfg)


# One process at a time


def hold(folder):
    """Another process that holds `folder`; it says so on its standard output, and ends when its input closes."""
    code = (
        "import sys, pathlib; from moerl.run_folder import lock\n"
        "with lock(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_folder_that_another_process_holds_is_refused_until_it_dies(tmp_path):
    folder = tmp_path / "runs" / "demo"
    process = hold(folder)
    try:
        with pytest.raises(ConfigError) as caught, lock(folder):
            pass
        assert str(caught.value) == (
            f"{folder} is in use by another moerl process; wait for it or choose another run.name"
        )
        with lock(folder.with_name("other")):
            pass
    finally:
        process.kill()  # as a SIGKILL would: nothing is cleaned up, the lock goes with the process
        process.communicate()
    with lock(folder):
        pass


def test_the_lock_survives_setting_aside(tmp_path):
    cfg = config(tmp_path)
    folder = started(cfg)
    with lock(folder):
        prepare(cfg, resumes=False)
        with pytest.raises(ConfigError), lock(folder):
            pass


def test_the_name_of_versions_is_kept_in_the_lock_and_lets_go_of_nothing(tmp_path):
    cfg = config(tmp_path)
    cfg.weight_sync.folder = str(tmp_path / "shared")
    with lock(folder_of(cfg)):
        name = versions_folder(cfg)
        with pytest.raises(ConfigError), lock(folder_of(cfg)):
            pass
    with lock(folder_of(cfg)):
        assert versions_folder(cfg) == name
    assert re.fullmatch(r"demo-[0-9a-f]{8}", name.name)
    assert name.parent == tmp_path / "shared"


def fail_inside(folder):
    with lock(folder):
        raise ValueError("inside")


def test_the_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(ValueError, match="inside"):
        fail_inside(tmp_path / "demo")
    with lock(tmp_path / "demo"):
        pass


@pytest.mark.parametrize("place", ["runs", "runs/demo"])
def test_a_file_in_its_place_is_named(tmp_path, place):
    cfg = config(tmp_path)
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("")
    with pytest.raises(ConfigError, match=re.escape(f"as {tmp_path / place} is a file")), lock(folder_of(cfg)):
        pass


# What a checkpoint is compatible with


def model_folder(tmp_path, name, **changes):
    values = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "vocab_size": 99}
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps({**values, **changes}))
    return model_id(str(tmp_path / name))


def test_the_model_id_is_of_the_architecture_alone(tmp_path):
    one = model_folder(tmp_path, "one")
    assert one == model_folder(tmp_path, "two", torch_dtype="bfloat16", transformers_version="9", use_cache=False)
    assert one != model_folder(tmp_path, "three", hidden_size=128)
    assert len(one) == 64
