"""tools/setup.py: what it would run on each Python, and an error that names what is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("moerl_setup_script", ROOT / "tools" / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(script, capsys, version, *, gpu=False):
    install = script.Installer(Path("/nowhere/venv"), dry_run=True)
    script.install_torch(install, version, gpu=gpu)
    script.install_megatron(install, version)
    return capsys.readouterr().out


def test_dry_run_runs_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "setup.py", "--venv", tmp_path / "v", "--dry-run"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "requirements/base.txt" in done.stdout
    assert not (tmp_path / "v").exists()


def test_python_311_builds_megatron_and_adds_triton(script, capsys):
    out = commands(script, capsys, (3, 11))
    assert "torch==2.13.0+cpu" in out
    assert "triton==3.9.0" in out
    assert (
        "--no-deps --no-build-isolation --ignore-requires-python --no-binary megatron-core megatron-core==0.19.2" in out
    )


@pytest.mark.parametrize("version", [(3, 12), (3, 13)])
def test_later_pythons_take_the_wheel(script, capsys, version):
    out = commands(script, capsys, version)
    assert "torch==2.14.1+cpu" in out
    assert "--no-binary" not in out


def test_a_gpu_takes_the_cuda_build_and_says_its_size(script, capsys):
    out = commands(script, capsys, (3, 12), gpu=True)
    assert "+cpu" not in out
    assert "about 3 GB to download" in out
    assert "triton==" not in out


def test_the_index_url_reaches_pip(script, capsys, monkeypatch):
    monkeypatch.setenv("MOERL_TORCH_INDEX_URL", "https://example.org/whl/cpu")
    assert "torch==2.13.0+cpu --extra-index-url https://example.org/whl/cpu" in commands(script, capsys, (3, 11))


def test_another_python_is_refused_by_number(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script.sys, "version_info", (3, 9, 1, "final", 0))
    with pytest.raises(script.SetupError, match=r"needs one of 3\.11, 3\.12, 3\.13.*make PYTHON="):
        script.set_up(tmp_path / "v", dry_run=True)


def test_no_compiler_is_named_on_311(script, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(script.SetupError, match=r"no C\+\+ compiler \(g\+\+\).*apt install g\+\+"):
        script.install_megatron(script.Installer(Path("/nowhere/venv"), dry_run=True), (3, 11))


def test_a_full_disk_is_named_before_the_download(script, monkeypatch, tmp_path):
    monkeypatch.setitem(script.FREE_BYTES, "cuda", 10**18)
    with pytest.raises(script.SetupError, match=r"has [\d.]+ GB free, but the cuda build of torch needs 1000000000 GB"):
        script.check_disk(tmp_path / "v", "cuda")


@pytest.mark.parametrize("content", [{"notes.txt": "mine"}, {"pyvenv.cfg": "version = 2.7.18\n"}])
def test_a_folder_that_is_not_ours_is_left_alone(script, tmp_path, content):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(script.SetupError, match="remove it or choose another --venv"):
        script.create_venv(script.Installer(tmp_path, dry_run=False), sys.version_info[:2])
    assert {path.name for path in tmp_path.iterdir()} == set(content)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("NewConnectionError: Failed to establish", "the package index cannot be reached"),
        ("error: command 'g++' failed", "the headers"),
    ],
)
def test_a_failed_step_says_why_and_shows_its_end(script, output, reason):
    text = script.explain("a step", output, "the headers", Path("log"))
    assert text.startswith(f"'a step' failed: {reason}")
    assert output in text


def test_a_failing_command_is_reported_with_its_output(script, tmp_path):
    install = script.Installer(tmp_path, dry_run=False)
    with pytest.raises(script.SetupError, match=r"'x' failed: install y\n    gone wrong"):
        install.run("x", [sys.executable, "-c", "import sys; print('gone wrong'); sys.exit(1)"], "install y")


def test_every_direct_requirement_is_pinned_and_locked():
    def names(name):
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        return dict(line.lower().replace("_", "-").split("==") for line in lines if line and not line.startswith("#"))

    lock = names("lock.txt")
    for name in ("base.txt", "dev.txt"):
        for package, version in names(name).items():
            assert lock.get(package) == version, f"{package} of {name}"


def test_pyproject_declares_what_is_installed():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    packages = {item.split(">")[0].split("=")[0] for item in declared}
    lines = (ROOT / "requirements" / "base.txt").read_text().splitlines()
    assert packages - {"torch", "megatron-core"} == {line.split("==")[0] for line in lines if line and line[0] != "#"}
