"""Several processes share what is to be checked before a conversion: a run's optimizer state is most of its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from conversions import save_run
from tiny_models import save_model

from moerl import world
from moerl.__main__ import main
from moerl.convert import inspection
from moerl.convert.building import Building
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.inspection import damaged_files, refuse_damage
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError
from moerl.manifest import MANIFEST, sums_of, write_manifest
from moerl.world import World

STEP = Path("checkpoints") / "step_000002"
OPTIMIZER = [700_000, 500_000, 400_000, 300_000, 300_000]
"""Bytes of files beside the weights."""


@pytest.fixture
def run(tmp_path) -> Path:
    hf = save_model(tmp_path / "hf", "softmax")
    import_checkpoint(find(hf), tmp_path / "shards", Layout(), Options())
    run = save_run(tmp_path / "run", tmp_path / "shards", hf)
    learner = run / STEP / "learner"
    for number, size in enumerate(OPTIMIZER):
        (learner / f"optimizer_{number}.bin").write_bytes(bytes([number]) * size)
    files = sums_of(run / STEP, [path for path in (run / STEP).rglob("*") if path.name != MANIFEST])
    write_manifest(run / STEP, {"step": 2, "files": files})
    return run


def read_by(run: Path, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    read: list[Path] = []
    check = inspection.check_file
    with monkeypatch.context() as patch:
        patch.setattr(inspection, "check_file", lambda path, entry: (read.append(path), check(path, entry)))
        refuse_damage(find(run), is_held_later=True, world=World(rank, size))
    return read


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_file_is_read_by_one_process_and_none_reads_much_more(run, size, monkeypatch):
    shares = [read_by(run, rank, size, monkeypatch) for rank in range(size)]
    every = sorted(path for share in shares for path in share)
    assert every == sorted(path for path in (run / STEP / "learner").iterdir())
    loads = [sum(path.stat().st_size for path in share) for share in shares]
    assert max(loads) - min(loads) <= 300_000


def test_damage_is_told_by_the_process_that_reads_it(run, tmp_path, monkeypatch, capsys):
    path = run / STEP / "learner" / "optimizer_1.bin"
    path.write_bytes(bytes(500_000))
    assert [len(damaged_files(find(run), world=World(rank, 2))) for rank in range(2)] in ([1, 0], [0, 1])
    finder = next(rank for rank in range(2) if damaged_files(find(run), world=World(rank, 2)))
    with pytest.raises(CheckpointError, match=r"optimizer_1\.bin does not match its SHA-256"):
        refuse_damage(find(run), world=World(finder, 2))
    monkeypatch.setattr(world, "SPEAKING_SECONDS", 0.0)
    monkeypatch.setattr(Building, "build", lambda *_, **__: None)
    for rank in range(2):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        assert main(["convert", "export", str(run), str(tmp_path / "out")]) == (rank == finder)
        told = " ".join(capsys.readouterr().err.split())
        assert ("optimizer_1.bin does not match its SHA-256" in told) == (rank == finder)
