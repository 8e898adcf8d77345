from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "configs" / "demo"
POLICY = DEMO / "policy_init"


def load_tool():
    spec = importlib.util.spec_from_file_location("make_demo", ROOT / "tools" / "make_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_demo = load_tool()


def read_jsonl(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DEMO / "data" / name).read_text().splitlines()]


def read_sft() -> list[dict[str, str]]:
    from pyarrow import parquet

    return parquet.read_table(DEMO / "data" / "sft.parquet").to_pylist()


def test_committed_files_are_what_the_tool_makes(capsys):
    assert make_demo.main(["--check"]) == 0
    assert "DIFFERS" not in capsys.readouterr().out
    assert sum(path.stat().st_size for path in (DEMO / "data").iterdir()) < 1_000_000


def test_check_notices_a_changed_byte_and_a_missing_file(tmp_path, capsys):
    shutil.copytree(DEMO, tmp_path / "demo")
    train = tmp_path / "demo" / "data" / "train.jsonl"
    train.write_bytes(train.read_bytes().replace(b"+", b"-", 1))
    (tmp_path / "demo" / "policy_init" / "tokenizer.json").unlink()
    sft = tmp_path / "demo" / "data" / "sft.parquet"
    make_demo.write_parquet(sft, read_sft()[:-1])
    assert make_demo.main(["--check", "--out", str(tmp_path / "demo")]) == 1
    differing = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DIFFERS")]
    assert [Path(line).name for line in differing] == ["sft.parquet", "train.jsonl", "tokenizer.json"]


def test_answers_are_right_and_prompts_are_disjoint():
    train, heldout = read_jsonl("train.jsonl"), read_jsonl("heldout.jsonl")
    assert (len(train), len(heldout)) == (4096, 256)
    prompts = [row["prompt"] for row in train + heldout]
    assert len(set(prompts)) == len(prompts)
    for row in train + heldout:
        expression = re.fullmatch(r"(\d(?:[+-]\d){2,5})=\?", row["prompt"])
        assert expression, row
        terms = re.findall(r"[+-]?\d", expression[1])
        partial = [sum(int(term) for term in terms[: i + 1]) for i in range(len(terms))]
        assert all(0 <= value < 20 for value in partial)
        assert str(partial[-1]) == row["answer"]


def test_warm_start_rows_have_the_stated_habits():
    rows = read_sft()
    train = {row["prompt"]: row["answer"] for row in read_jsonl("train.jsonl")}
    assert len(rows) == 520 * 64
    for phase, (start, stop, direct) in enumerate([(0, 26880, 0.2), (26880, 33280, 0.7)]):
        part = rows[start:stop]
        boxed = [r"\boxed{" in row["completion"] for row in part]
        steps = [row["completion"].count(",") + ("=" in row["completion"].lstrip("=")) > 0 for row in part]
        assert 1 - sum(boxed) / len(part) == pytest.approx(0.15, abs=0.015), phase
        assert 1 - sum(steps) / len(part) == pytest.approx(direct, abs=0.02), phase
    for row in rows:
        assert train[row["prompt"]] == row["answer"]
        assert row["completion"].endswith((f"={row['answer']}", f"\\boxed{{{row['answer']}}}"))
        *steps, _ = [*re.findall(r"(\d+)([+-])(\d)=(\d+)", row["completion"]), None]
        for left, operator, right, result in steps:
            assert int(left) + int(operator + right) == int(result)
        assert "<eos>" not in row["completion"]


def test_the_tokenizer_round_trips_every_text():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    assert len(tokenizer) == 38
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.convert_ids_to_tokens([2, 3]) == ["\\boxed{", "}"]
    ids = tokenizer.encode(r"1+2=3\boxed{3}<eos>")
    assert ids == [5, 14, 6, 18, 7, 2, 7, 3, 1]
    texts = {row["prompt"] + row["completion"] for row in read_sft()[::10]} | {
        make_demo.VOCABULARY[i] for i in range(38)
    }
    for text in texts:
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded) == text
        assert len(encoded) == len(re.findall(r"<pad>|<eos>|\\boxed\{|.", text))


def test_the_chat_template_only_joins():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    messages = [{"role": "user", "content": "1+2"}, {"role": "user", "content": "=?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "1+2=?"


def test_the_config_is_the_stated_model():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(POLICY)
    model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 425_088
    assert config.rope_parameters["rope_theta"] == 1e4
    assert config.norm_topk_prob is True
    assert not list(POLICY.glob("*.safetensors"))
