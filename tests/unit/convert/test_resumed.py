"""A conversion that goes on after a failure or a kill makes what an undisturbed one would have made."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tiny_models import save_model

from moerl.convert import building
from moerl.convert.building import Building
from moerl.convert.compare import compare_weights
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.inspection import refuse_damage
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError

SMALL = Options(max_file_bytes=16_000)


class Killed(BaseException):
    """Stands for a kill: nothing in the code catches it."""


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next conversion is killed once it has made `count` files."""
    make, made = Building._make, []

    def limited(self, number, *rest):
        if len(made) == count:
            raise Killed
        made.append(number)
        return make(self, number, *rest)

    monkeypatch.setattr(Building, "_make", limited)


def test_a_corrected_configuration_starts_anew(tmp_path, monkeypatch):
    """The same files of weights under other numbers of heads are cut otherwise, into tensors of the same shapes."""
    hf = save_model(tmp_path / "hf", "mixtral")
    right = json.loads((hf / "config.json").read_text())
    size = right.get("head_dim") or right["hidden_size"] // right["num_attention_heads"]
    heads = {name: 2 * right[name] for name in ("num_attention_heads", "num_key_value_heads")}
    (hf / "config.json").write_text(json.dumps({**right, **heads, "head_dim": size // 2}))
    with monkeypatch.context() as patch:
        stop_after(6, patch)
        with pytest.raises(Killed):
            import_checkpoint(find(hf), tmp_path / "out", Layout(), SMALL)
    (hf / "config.json").write_text(json.dumps(right))
    built = import_checkpoint(find(hf), tmp_path / "out", Layout(), SMALL)
    assert built is not None
    assert built.num_resumed == 0
    assert not compare_weights(find(hf), find(tmp_path / "out")).differences


def refuse(*_) -> None:
    raise OSError(16, "Device or resource busy")


def test_what_an_earlier_end_wrote_is_no_part_of_the_folder(tmp_path, monkeypatch):
    """Neither its manifest nor settings that the source has no more."""
    hf = save_model(tmp_path / "hf", "softmax")
    (hf / "chat_template.jinja").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(building, "put_in_place", refuse)
        with pytest.raises(CheckpointError, match="Device or resource busy"):
            import_checkpoint(find(hf), tmp_path / "out", Layout(), SMALL)
    (hf / "chat_template.jinja").unlink()
    built = import_checkpoint(find(hf), tmp_path / "out", Layout(), SMALL)
    assert built is not None
    assert built.num_resumed == len(built.sums)
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    assert "manifest.json" not in json.loads((tmp_path / "out" / "manifest.json").read_text())["files"]
    refuse_damage(find(tmp_path / "out"), 1)


def test_a_kill_after_the_folder_went_into_place_is_gone_on_from(tmp_path, monkeypatch):
    """The old target is set aside and the new one there; work on a target of a name like that is left alone."""
    hf, out = save_model(tmp_path / "hf", "softmax"), tmp_path / "o[u]t"
    import_checkpoint(find(hf), out, Layout(), SMALL)
    replacing = dataclasses.replace(SMALL, overwrite=True)

    def killed_halfway(made: Path, target: Path) -> None:
        target.rename(target.with_name(f".{target.name}.old-123"))
        made.rename(target)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(building, "put_in_place", killed_halfway)
        with pytest.raises(Killed):
            import_checkpoint(find(hf), out, Layout(), replacing)
    others = tmp_path / ".o[u]t.old-1.converting"
    others.mkdir()
    import_checkpoint(find(hf), out, Layout(), replacing)
    refuse_damage(find(out), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["hf", others.name, out.name])
