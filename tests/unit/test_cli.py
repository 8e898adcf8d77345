"""The command line: help that teaches, bad input as one message and status 2, and nothing heavy before the rules."""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import moerl.commands
from moerl.__main__ import COMMANDS, _run, main, parse
from moerl.commands.train import _going_on
from moerl.configure import load
from moerl.errors import CheckpointError, ConfigError, DataError, Interrupted, NumericsError

HEAVY = ("torch", "numpy", "transformers", "megatron", "matplotlib")


@pytest.fixture
def base(tmp_path):
    """A configuration that passes every rule; its model is too empty to be loaded."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    (tmp_path / "sums.jsonl").write_text("{}\n")
    path = tmp_path / "base.yaml"
    path.write_text(f"""
run: {{name: demo, num_steps: 10, output_dir: {tmp_path}/runs}}
model: {{path: {tmp_path}/model}}
data: {{train: [{{name: sums, source: {{path: {tmp_path}/sums.jsonl}}}}]}}
reward: {{rewards: [exact_match]}}
""")
    return path


def refusal(capsys, *arguments):
    """Standard error of a command that must be refused as bad input, without its prefix."""
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("moerl: ")
    assert err.endswith("\n")
    assert "Traceback" not in err
    return err.removeprefix("moerl: ").rstrip("\n")


def exits(capsys, *arguments):
    """(status, standard output, standard error) of what argparse ends."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def module_of(name):
    return importlib.import_module("moerl.commands." + name.replace("-", "_"))


def parser_of(name):
    command = module_of(name)
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    return parser


def examples_of(name):
    """The example lines of a command's help as lists of arguments; two blanks begin what is said of them."""
    text = module_of(name).HELP
    lines = [shlex.split(line) for line in re.findall(r"^  moerl (.*?)(?:  .*)?$", text, re.MULTILINE)]
    return [words[1:] for words in lines if words[0] == name]


# Help


def test_every_command_module_is_in_the_overview():
    assert {info.name.replace("_", "-") for info in pkgutil.iter_modules(moerl.commands.__path__)} == set(COMMANDS)


def test_the_overview_names_every_command_with_its_line(capsys):
    status, out, err = exits(capsys, "--help")
    assert (status, err) == (0, "")
    flowing = " ".join(out.split())  # long lines are folded
    for name, line in COMMANDS.items():
        assert f" {name} {line}" in flowing
    assert "`moerl COMMAND --help` says more" in out


def test_the_version(capsys):
    assert exits(capsys, "--version") == (0, f"moerl {moerl.__version__}\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_says_what_it_does_how_and_with_what(name, capsys):
    status, out, err = exits(capsys, name, "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: moerl {name}")
    assert module_of(name).HELP.strip() in out  # as it was written, not refilled
    assert examples_of(name)
    for action in parser_of(name)._actions:
        assert action.help, f"{action.dest} is not explained"
        assert not action.option_strings or action.option_strings[0] in out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_the_help_are_understood(name):
    for arguments in examples_of(name):
        args = parse(parser_of(name), arguments)
        configuration = getattr(args, "config", None) or getattr(args, "target", "")
        if configuration.endswith(".yaml"):
            load(configuration, args.overrides)


@pytest.mark.parametrize("name", ["train", "eval"])
def test_what_an_argument_s_help_gives_as_an_example_is_a_key(name, base):
    for action in parser_of(name)._actions:
        for override in re.findall(r"such as (\S+=\S+)", action.help or ""):
            load(base, [override])


# Bad usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["trian"], "invalid choice: 'trian' (choose from"),
        (["train"], "required: config"),
        (["train", "x.yaml", "--fast"], "unrecognized arguments: --fast"),
        (["eval", "runs/x", "--step", "last"], "argument --step: invalid int value: 'last'"),
        (["eval", "runs/x", "--step", "3", "--model", "m"], "not allowed with argument"),
        (["report"], "required: RUN"),
    ],
)
def test_bad_usage_is_status_2_with_the_usage(arguments, message, capsys):
    status, out, err = exits(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("usage: moerl")
    assert message in err


# Bad input


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_missing_file_names_its_neighbour(command, base, capsys):
    path = base.with_name("bsae.yaml")
    assert refusal(capsys, command, path) == f"there is no configuration file {path}; did you mean {base}?"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optm.lr=1", ["override 'optm.lr=1': unknown key 'optm'; did you mean 'optim'?"]),
        ("run.num_stps=3", ["unknown key 'run.num_stps'; did you mean 'run.num_steps'?"]),
        ("optim.lr=fast", ["override 'optim.lr=fast': optim.lr is 'fast', but must be a number"]),
        ("rollout.group_size=2.5", ["rollout.group_size is 2.5, but must be a whole number"]),
        ("telemetry.report=maybe", ["telemetry.report is 'maybe', but must be"]),
        ("run.seed", ["override 'run.seed': must be key=value, such as"]),
        ("algorithm.preset=gsop", ["there is no preset 'gsop'; did you mean 'gspo'? Known: "]),
        ("run.resume=alwys", ["run.resume is 'alwys', but must be one of auto, required, never"]),
        (
            "algorithm.level=tokn",
            ["algorithm.level is 'tokn', but must be one of none, token", "(did you mean 'token'?)"],
        ),
        ("algorithm.routing=r3", ["algorithm.routing is 'r3'", "(did you mean 'R3'?)"]),
        (
            "algorithm.kl.coefficient=-1",
            ["algorithm.kl.coefficient is -1.0, but must be a finite number of at least 0"],
        ),
        ("algorithm.kl.coefficient=.inf", ["algorithm.kl.coefficient is inf, but must be a finite number"]),
        ("algorithm.trust.low=3", ["algorithm.trust (clip): unknown key 'low'; did you mean 'lo'?"]),
        ("algorithm.trust.lo=wide", ["algorithm.trust (clip): ", "wide"]),
        (
            "rollout.engine=lokal",
            ["rollout.engine: no rollout engine is called 'lokal'; did you mean 'local'? Known: "],
        ),
        ("reward.rewards=[quality]", ["reward.rewards[0]: no reward is called 'quality'. Known: "]),
        ("reward.rewards=['no.such.module:x']", ["reward.rewards[0]: ", "cannot import 'no.such.module'"]),
        ("model.path=nowhere", ["model.path is nowhere, but there is no such folder"]),
    ],
)
def test_a_bad_override(override, parts, base, capsys):
    text = refusal(capsys, "train", base, override)
    assert all(part in text for part in parts), text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("optim: {lrr: 1}", "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        ("optim: {lr: fast}", "optim.lr is 'fast', but must be a number"),
        ("optim: [", "not valid YAML"),
    ],
)
def test_a_fault_in_a_file_names_the_file(line, message, base, capsys):
    path = base.with_name("mine.yaml")
    path.write_text(f"extends: base.yaml\n{line}\n")
    text = refusal(capsys, "train", path)
    assert text.startswith(str(path))
    assert message in text


FAULTS = {
    "rollout.temperature=0": "rollout.temperature is 0.0, but training needs",
    "optim.schedule=cosin": "optim.schedule is 'cosin', but must be one of",
    "model.path=nowhere": "model.path is nowhere, but there is no such folder",
    "batch.num_minibatches=99": "batch.num_minibatches is 99, but must be at most",
    "algorithm.level=tokn": "algorithm.level is 'tokn', but must be one of",
    "data.train[0].source.path=gone.jsonl": "data.train[0].source.path is gone.jsonl, but there is no such file",
}


@pytest.mark.parametrize("command", ["train", "eval"])
def test_all_faults_of_values_and_rules_come_together(command, base, capsys):
    first, *lines = refusal(capsys, command, base, *FAULTS).splitlines()
    assert first == f"{len(FAULTS)} faults in the configuration:"
    assert len(lines) == len(FAULTS)
    for message in FAULTS.values():
        assert sum(line.startswith(f"  - {message}") for line in lines) == 1


def test_half_a_launcher_is_told_without_a_traceback(base, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "the environment has RANK=None" in refusal(capsys, "train", base)


def test_all_faults_of_plugin_nodes_come_together(base, capsys):
    overrides = [
        "algorithm.trust.low=3",
        "rollout.engine=lokal",
        "reward.rewards=[exakt_match]",
        "algorithm.filters=[x]",
    ]
    first, *lines = refusal(capsys, "train", base, *overrides).splitlines()
    assert first == "4 faults in the configuration:"
    where = ["algorithm.trust (clip): ", "rollout.engine: ", "algorithm.filters[0]: ", "reward.rewards[0]: "]
    assert [line.startswith(f"  - {name}") for line, name in zip(lines, where, strict=True)] == [True] * 4


def test_overrides_may_follow_options(base, capsys):
    assert "override 'optm.lr=1'" in refusal(capsys, "eval", base, "--json", "optm.lr=1")
    assert "override 'optm.lr=1'" in refusal(capsys, "eval", "--json", base, "optm.lr=1")


def test_refused_input_leaves_nothing_behind(base, capsys):
    before = sorted(base.parent.rglob("*"))
    refusal(capsys, "train", base, *FAULTS)
    refusal(capsys, "train", base, "rollout.engine=lokal")
    assert sorted(base.parent.rglob("*")) == before


def test_eval_says_what_its_target_lacks(base, capsys):
    text = refusal(capsys, "eval", base)
    assert text.startswith(
        f"{base} names no evaluation.sets, so that there is nothing to evaluate on; add one, such as"
    )
    example = re.search(r"evaluation\.sets='(.*)'$", text)
    assert example is not None
    sets = example[1].replace("held.jsonl", str(base.with_name("sums.jsonl")))
    assert load(base, [f"evaluation.sets={sets}"]).evaluation.sets[0].name == "held"  # the advice works

    folder = base.parent
    assert refusal(capsys, "eval", folder) == (
        f"{folder} is a folder without config.yaml: give a run folder, or a configuration with --model {folder}"
    )
    assert refusal(capsys, "eval", base, "--step", "3") == (
        f"--step 3 needs a run folder, and {base} is a configuration file"
    )


def test_report_says_what_its_folder_lacks(tmp_path, capsys):
    assert f"{tmp_path}: not a run folder, it has no metrics.jsonl" in refusal(capsys, "report", tmp_path)
    missing = tmp_path / "nope"
    assert f"{missing}: no such run folder" in refusal(capsys, "report", missing)


def test_report_writes_every_page_and_says_where(tmp_path, capsys):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        rows = [{"step": step, "reward/mean": step / 10} for step in range(4)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", *map(str, folders)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder / "report.html") for folder in folders]
    assert all((folder / "report.html").read_text().lstrip().startswith("<") for folder in folders)


# Exit status


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("a"), 2, "moerl: a\n"),
        (DataError("b.jsonl:3: c"), 2, "moerl: b.jsonl:3: c\n"),
        (CheckpointError("d"), 1, "moerl: d\n"),
        (NumericsError("e"), 1, "moerl: e\n"),
        (Interrupted("f"), 130, "moerl: f\n"),
        (KeyboardInterrupt(), 130, "moerl: stopped at once; the last complete checkpoint is untouched, "),
        (OSError(errno.ENOSPC, "No space left on device", "x/y"), 1, "moerl: x/y cannot be written or read (No space"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 1, "moerl: x cannot be written or read (Permission"),
    ],
)
def test_each_error_has_its_exit_status_and_one_line(error, status, message, capsys):
    def fail(args):
        raise error

    assert _run(fail, argparse.Namespace()) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), FileNotFoundError(errno.ENOENT, "no such file", "x")])
def test_a_defect_keeps_its_traceback(error):
    def fail(args):
        raise error

    with pytest.raises(type(error)):
        _run(fail, argparse.Namespace())


@pytest.mark.parametrize(
    ("overrides", "resume", "expected"),
    [
        (["run.seed=1"], "auto", ["run.seed=1"]),
        (["run.seed=1"], "required", ["run.seed=1"]),
        (["run.resume=never", "run.seed=1"], "never", ["run.seed=1", "run.resume=auto"]),
        ([" run.resume =never"], "never", ["run.resume=auto"]),
        ([], "never", ["run.resume=auto"]),  # it stood in the file
    ],
)
def test_the_command_that_goes_on_never_starts_anew(overrides, resume, expected):
    assert _going_on(overrides, resume) == expected


# In a process of its own


def python(code, *arguments):
    return subprocess.run([sys.executable, *code, *map(str, arguments)], capture_output=True, text=True, check=False)


PROBE = """
import json, sys
from moerl.__main__ import main
statuses = []
for arguments in json.loads(sys.argv[1]):
    try:
        statuses.append(main(arguments))
    except SystemExit as error:
        statuses.append(error.code)
print(json.dumps([statuses, sorted(name for name in sys.modules if "." not in name)]))
"""


def test_help_and_every_fault_of_values_and_rules_come_before_anything_heavy_is_imported(base):
    helps = [["--help"], *([name, "--help"] for name in COMMANDS)]
    faults = [["nowhere.yaml"], [str(base), "optm.lr=1"], [str(base), *FAULTS]]
    faulty = [[command, *arguments] for command in ("train", "eval") for arguments in faults]
    faulty += [["eval", str(base), "--step", "3"], ["eval", str(base.parent)]]
    done = python(["-c", PROBE], json.dumps([*helps, *faulty]))
    assert done.returncode == 0, done.stderr
    statuses, modules = json.loads(done.stdout.splitlines()[-1])
    assert statuses == [0] * len(helps) + [2] * len(faulty)
    assert [name for name in HEAVY if name in modules] == []


def test_faults_of_plugin_nodes_come_before_a_learner_or_an_engine_is_imported(base):
    done = python(["-c", PROBE], json.dumps([["train", str(base), "rollout.engine=lokal"]]))
    assert done.returncode == 0, done.stderr
    statuses, modules = json.loads(done.stdout.splitlines()[-1])
    assert statuses == [2]
    assert "torch" in modules  # the probe sees what is imported
    assert not {"megatron", "transformers"} & set(modules)


def test_the_module_ends_with_the_status_of_its_command(base):
    done = python(["-m", "moerl"], "train", base, "optm.lr=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("moerl: override 'optm.lr=1': unknown key 'optm'; did you mean 'optim'?")


def test_the_console_script_is_this_main():
    scripts = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'moerl = "moerl.__main__:main"' in scripts
