"""A checkpoint may have more files than a process may have open by default."""

from __future__ import annotations

import resource
import shutil

from conversions import convert
from tiny_models import save_model

from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find


def export(tmp_path, soft: int, hard: int) -> tuple[int, str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    process = convert("export", tmp_path / "shards", tmp_path / "back", preexec_fn=limit)
    told = process.communicate(timeout=120)[1]
    return process.returncode, " ".join(told.split())


def test_the_limit_of_open_files_is_raised_and_named_where_it_is_too_low(tmp_path):
    hf = save_model(tmp_path / "hf", "softmax")
    import_checkpoint(find(hf), tmp_path / "shards", Layout(), Options(max_file_bytes=2000))
    count = len(list((tmp_path / "shards").glob("rank_*.safetensors")))
    assert count > 64
    status, told = export(tmp_path, 64, 64)
    assert status == 1
    assert "cannot be opened (Too many open files)" in told
    assert "ulimit -Hn" in told
    assert "damaged" not in told
    assert not (tmp_path / "back").exists()
    for soft in (64, count + 4):  # the latter has room for what is read, and none for what is written
        status, told = export(tmp_path, soft, 1024)
        assert status == 0, told
        shutil.rmtree(tmp_path / "back")
