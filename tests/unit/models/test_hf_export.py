from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moerl.errors import CheckpointError, DataError
from moerl.models.hf_export import COPIED_FILES, leftover, sweep, write_hf_folder
from moerl.models.hf_folder import INDEX_FILE, SINGLE_FILE, HFFolder, read_config

WEIGHTS = {f"w{i}": torch.full((10, i + 1), float(i)) for i in range(6)} | {"count": torch.arange(4)}


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"b": 1, "torch_dtype": "bfloat16", "a": [2]}))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    (folder / "model.safetensors").write_bytes(b"old weights are not copied")
    (folder / "README.md").write_text("nor is this")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_single_file_and_what_is_copied(tmp_path, source):
    out = tmp_path / "out"
    write_hf_folder(out, WEIGHTS.items(), source)
    names = {"config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", SINGLE_FILE}
    assert set(content(out)) == names
    assert content(out)["tokenizer.json"] == content(source)["tokenizer.json"]
    assert list(read_config(out).items()) == [("b", 1), ("torch_dtype", "float32"), ("a", [2])]
    read = HFFolder(out)
    assert read.names() == set(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert torch.equal(read.get(name), tensor)
    assert leftovers(tmp_path) == []


def test_a_tokenizer_of_the_folders_own_code_comes_along(tmp_path, source):
    """As Kimi-K2 has it: a vocabulary of tiktoken's, and modules of which `auto_map` names some."""
    kimi = {
        "tiktoken.model": b"IQ== 0\n",
        "tokenization_kimi.py": b"from .tool_declaration_ts import encode\nraise SystemExit(7)\n",
        "tool_declaration_ts.py": b"raise SystemExit(7)\n",
        "tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null]}}',
    }
    for name, text in kimi.items():
        (source / name).write_bytes(text)
    (source / "inference").mkdir()
    (source / "inference" / "generate.py").write_text("")
    (source / "folder.py").mkdir()
    write_hf_folder(tmp_path / "out", WEIGHTS.items(), source, record={})
    found = content(tmp_path / "out")
    assert kimi.items() <= found.items()
    assert not {"inference", "folder.py", "README.md"} & found.keys()
    manifest = json.loads((tmp_path / "out" / "moerl_manifest.json").read_text())
    assert kimi.keys() <= manifest["files"].keys()


def test_the_tokenizer_that_engines_take_for_mixtral_comes_along(tmp_path, source):
    """mistral-common takes `tekken.json`, or the last version; with `tokenizer.model` alone prompts are the first's."""
    names = ("tokenizer.model", "tokenizer.model.v3", "tekken.json")
    for name in names:
        (source / name).write_text(name)
    (source / "tokenizer.model.bak").write_text("mine")
    write_hf_folder(tmp_path / "out", WEIGHTS.items(), source, record={})
    found = content(tmp_path / "out")
    assert {name: found[name] for name in names} == {name: name.encode() for name in names}
    assert "tokenizer.model.bak" not in found


LINKED = [*COPIED_FILES, "modeling.py", "additional_chat_templates/tool_use.jinja"]


@pytest.mark.parametrize("name", LINKED)
def test_a_link_out_of_the_folder_is_refused_before_anything_is_written(tmp_path, source, name):
    (tmp_path / "secret").write_text("a key")
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(tmp_path / "secret")
    told = f"{source / name} is a link to {tmp_path / 'secret'}, outside of {source}"
    with pytest.raises(CheckpointError, match=f"{re.escape(told)}.* put the file itself in its place"):
        write_hf_folder(tmp_path / "out", WEIGHTS.items(), source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "source"]


def link_farm(source, farm, keep=()):
    """Every file of `source` as a link, but for copies of those in `keep`."""
    for path in sorted(source.rglob("*")):
        target = farm / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name in keep:
            target.write_bytes(path.read_bytes())
        elif path.is_file():
            target.symlink_to(path)
    return farm


def test_a_folder_of_links_to_another_one_and_a_config_of_its_own_is_read(tmp_path, source):
    """As people make it to change a field without copying the weights."""
    (source / "model-00001-of-00001.safetensors").write_bytes(b"weights")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (source / "tokenizer.json").write_text("{}")
    farm = link_farm(source, tmp_path / "farm", keep={"config.json"})
    write_hf_folder(tmp_path / "out", WEIGHTS.items(), farm)
    write_hf_folder(tmp_path / "same", WEIGHTS.items(), source)
    assert content(tmp_path / "out") == content(tmp_path / "same")
    again = link_farm(farm, tmp_path / "again", keep={"config.json"})  # links to links
    write_hf_folder(tmp_path / "third", WEIGHTS.items(), again)
    assert content(tmp_path / "third") == content(tmp_path / "same")


@pytest.mark.parametrize(
    ("name", "target", "weights"),
    [
        ("tokenizer.json", "other/vocab.json", "model.safetensors"),  # another name
        ("tokenizer.json", "elsewhere/tokenizer.json", "model.safetensors"),  # another folder
        ("tokenizer.json", "other/inner/tokenizer.json", "model.safetensors"),
        ("tokenizer.json", "other/tokenizer.json", "other.safetensors"),  # no weights of this folder
        ("tokenizer.json", "other/tokenizer.json", None),
        ("modeling.py", "other/modeling.py", "model.safetensors"),  # code, which somebody may run
        ("additional_chat_templates/a.jinja", "other/a.jinja", "model.safetensors"),
    ],
)
def test_a_link_that_weights_do_not_vouch_for_is_refused(tmp_path, source, name, target, weights):
    place = tmp_path / target
    place.parent.mkdir(parents=True)
    place.write_text("{}")
    (tmp_path / "other" / "w").parent.mkdir(exist_ok=True)
    (tmp_path / "other" / "w").write_bytes(b"weights")
    if weights is not None:
        (source / weights).unlink(missing_ok=True)
        (source / weights).symlink_to(tmp_path / "other" / "w")
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(place)
    with pytest.raises(CheckpointError, match=re.escape(f"{source / name} is a link to {place}, outside of {source}")):
        write_hf_folder(tmp_path / "out", WEIGHTS.items(), source)
    assert not (tmp_path / "out").exists()


def test_links_inside_the_folder_and_into_the_hubs_cache_are_followed(tmp_path, source):
    (source / "real.py").write_text("1")
    (source / "inside.py").symlink_to("real.py")
    (source / "gone.py").symlink_to("nowhere.py")
    (source / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["../secret.T", null]}}')
    repo = tmp_path / "models--a--b"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots").mkdir()
    snapshot = source.rename(repo / "snapshots" / "0123abc")
    for number, name in enumerate(("cached.py", "vocab.json", "config.json")):
        blob = repo / "blobs" / str(number)
        blob.write_text("{}" if name == "config.json" else f"cached {name}")
        (snapshot / name).unlink(missing_ok=True)
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    local = tmp_path / "local"  # the hub's client has filled folders with such links
    local.mkdir()
    for name in ("vocab.json", "config.json"):
        (local / name).symlink_to((snapshot / name).resolve())
    write_hf_folder(tmp_path / "out", WEIGHTS.items(), snapshot)
    found = {name: text for name, text in content(tmp_path / "out").items() if name.endswith((".py", "vocab.json"))}
    vocabulary = {"vocab.json": b"cached vocab.json"}
    assert found == {"real.py": b"1", "inside.py": b"1", "cached.py": b"cached cached.py", **vocabulary}
    write_hf_folder(tmp_path / "again", WEIGHTS.items(), local)
    assert vocabulary.items() <= content(tmp_path / "again").items()


def test_chat_templates_that_have_names_come_along(tmp_path, source):
    """As transformers saves them: a folder beside the tokenizer."""
    templates = source / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    (templates / "notes.txt").write_text("not one")
    write_hf_folder(tmp_path / "out", WEIGHTS.items(), source, record={})
    copied = tmp_path / "out" / "additional_chat_templates"
    assert content(copied) == {"tool_use.jinja": b"{{ tools }}"}
    manifest = json.loads((tmp_path / "out" / "moerl_manifest.json").read_text())
    assert manifest["files"]["additional_chat_templates/tool_use.jinja"]["bytes"] == 11


def ended() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def owned(what: str, number: int, host: str = "") -> str:
    """Name of what a process has beside `h[f]`."""
    return f".h[f].{what}-{host or own_host()}-{number}-0123abcd"


def own_host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:40]


def test_what_killed_processes_left_beside_the_target_goes(tmp_path, source):
    """Whatever the name; what a living process has, and what only begins with the name, stays."""
    out, dead = tmp_path / "h[f]", ended()
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gone = [owned(what, number) for what in ("building", "old") for number in (dead, os.getpid())]
    kept = [owned(what, living.pid) for what in ("building", "old")]
    kept += [f"{owned('old', dead)}.converting", ".h[f].old-mine", f".hf.old-{dead}", owned("building", dead)[:-1]]
    for name in (*gone, *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("")
    write_hf_folder(out, WEIGHTS.items(), source)
    write_hf_folder(out, WEIGHTS.items(), source)
    living.communicate(b"\n")
    assert sorted(leftovers(tmp_path)) == sorted(kept)
    for name in (owned("modelopt", dead), owned("modelopt", os.getppid())):
        (tmp_path / f"{name}-ab_1").mkdir()
    sweep(out, "modelopt")
    assert sorted(leftovers(tmp_path)) == sorted([*kept, f"{owned('modelopt', os.getppid())}-ab_1"])
    assert HFFolder(out).names() == set(WEIGHTS)


def test_what_another_machine_builds_stays_for_a_day(tmp_path, source):
    """Its processes have numbers that mean others here, or nothing; so may those of a version that named no machine."""
    out, dead = tmp_path / "h[f]", ended()
    names = [owned("building", dead, "far_away"), owned("building", os.getpid(), "far_away"), f".h[f].building-{dead}"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-0").write_text("")
        os.utime(tmp_path / name, (0, 0))  # a file in it may be younger
    write_hf_folder(out, WEIGHTS.items(), source)
    assert sorted(leftovers(tmp_path)) == sorted(names)
    for name in names:
        for path in (tmp_path / name / "part-0", tmp_path / name):
            os.utime(path, (time.time() - 90_000,) * 2)
    write_hf_folder(out, WEIGHTS.items(), source)
    assert leftovers(tmp_path) == []


def test_two_machines_may_write_beside_one_another(tmp_path, source):
    """Two exports of one process are two names, and each is told from those of other processes."""
    first, second = (leftover(tmp_path / "out", "building") for _ in range(2))
    assert first != second
    assert first.parent == tmp_path
    assert first.name.startswith(f".out.building-{own_host()}-{os.getpid()}-")


def test_shards_are_bounded_and_indexed(tmp_path, source):
    out = tmp_path / "out"
    write_hf_folder(out, WEIGHTS.items(), source, max_shard_bytes=250)
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert shards == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert len(shards) > 2
    index = json.loads((out / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert set(index["weight_map"]) == set(WEIGHTS)
    for shard in shards:
        held = [name for name, file in index["weight_map"].items() if file == shard]
        assert len(held) == 1 or sum(WEIGHTS[name].nbytes for name in held) <= 250
    read = HFFolder(out)
    for name, tensor in WEIGHTS.items():
        assert torch.equal(read.get(name), tensor)


@pytest.mark.parametrize("max_shard_bytes", [250, 10**9])
def test_bytes_are_deterministic(tmp_path, source, max_shard_bytes):
    for name in ("one", "two"):
        write_hf_folder(tmp_path / name, WEIGHTS.items(), source, max_shard_bytes=max_shard_bytes)
    assert content(tmp_path / "one") == content(tmp_path / "two")


@pytest.mark.parametrize("spelling", ["torch_dtype", "dtype", None])
def test_casts_floats_only_and_says_so(tmp_path, source, spelling):
    config = {"x": 1} if spelling is None else {"x": 1, spelling: "float32"}
    (source / "config.json").write_text(json.dumps(config))
    write_hf_folder(tmp_path / "out", WEIGHTS.items(), source, dtype=torch.bfloat16)
    read = HFFolder(tmp_path / "out")
    assert read.get("w3").dtype == torch.bfloat16
    assert read.get("count").dtype == torch.int64
    assert read_config(tmp_path / "out") == {"x": 1, spelling or "torch_dtype": "bfloat16"}


def test_tensors_may_change_after_they_were_handed_over(tmp_path, source):
    def stream() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.zeros(3)
        for i in range(3):
            buffer.fill_(i)
            yield f"w{i}", buffer

    write_hf_folder(tmp_path / "out", stream(), source)
    assert [HFFolder(tmp_path / "out").get(f"w{i}").tolist() for i in range(3)] == [[i] * 3 for i in range(3)]


def test_views_and_shared_memory_are_written_whole(tmp_path, source):
    base = torch.arange(12.0).reshape(3, 4)
    write_hf_folder(tmp_path / "out", [("t", base.T), ("row", base[1]), ("same", base[1])], source)
    read = HFFolder(tmp_path / "out")
    assert torch.equal(read.get("t"), base.T)
    assert torch.equal(read.get("row"), read.get("same"))


def test_an_older_folder_is_replaced_and_survives_a_failure(tmp_path, source):
    out = tmp_path / "out"
    write_hf_folder(out, [("w", torch.ones(2))], source)

    def breaking() -> Iterator[tuple[str, Tensor]]:
        yield "w", torch.zeros(2)
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="the trainer died"):
        write_hf_folder(out, breaking(), source, max_shard_bytes=1)
    assert HFFolder(out).get("w").tolist() == [1, 1]
    write_hf_folder(out, [("w", torch.zeros(2)), ("v", torch.zeros(1))], source)
    assert HFFolder(out).names() == {"w", "v"}
    assert leftovers(tmp_path) == []


def test_bad_input(tmp_path, source):
    with pytest.raises(CheckpointError, match="tensor 'w' came twice"):
        write_hf_folder(tmp_path / "out", [("w", torch.ones(1)), ("w", torch.ones(1))], source)
    with pytest.raises(CheckpointError, match="no tensors to write"):
        write_hf_folder(tmp_path / "out", [], source)
    with pytest.raises(DataError, match=r"config\.json does not exist"):
        write_hf_folder(tmp_path / "out", WEIGHTS.items(), tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/out .*free space or choose another folder"):
        write_hf_folder(tmp_path / "file" / "out", WEIGHTS.items(), source)
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == []


FULL_DISK = """
import resource, signal, sys, torch
from moerl.errors import CheckpointError
from moerl.models.hf_export import write_hf_folder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_hf_folder(sys.argv[2], [("w", torch.zeros(100_000))], sys.argv[1])
except CheckpointError as error:
    print(error)
"""


def test_a_disk_that_refuses(tmp_path, source):
    out = tmp_path / "out"
    write_hf_folder(out, [("w", torch.ones(2))], source)
    command = [sys.executable, "-c", FULL_DISK, str(source), str(out)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert f"cannot write {out}" in said
    assert "free space" in said
    assert HFFolder(out).get("w").tolist() == [1, 1]
    assert leftovers(tmp_path) == []


def test_transformers_reads_it_back(tmp_path):
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = dict(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=7,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=3,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "source")
    folder = HFFolder(tmp_path / "source")
    stream = ((name, folder.get(name)) for name in sorted(folder.names()))
    write_hf_folder(tmp_path / "out", stream, tmp_path / "source", max_shard_bytes=2000)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config.dtype == torch.float32
