r"""Make the demo's data and its untrained policy, the same bytes every time: `python tools/make_demo.py [--check]`.

The task, "sum": `3+8-5+9=?`, three to six single digits, every partial value in 0..19. A good answer works step by step
and boxes the result, `3+8=11,11-5=6,6+9=15\boxed{15}`. The warm-start rows (sft.parquet, in training order) teach the
steps first and then the bad habit of answering at once, which reinforcement learning has to undo. For the recipe with a
tool, calculator_sft.parquet teaches to call one, `<3+8-5+9>` (the calculator then writes `15;`), in a third of the
answers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

DEMO = Path(__file__).resolve().parent.parent / "configs" / "demo"
NUM_TRAIN, NUM_HELDOUT = 4096, 256
TRAIN_SEED, HELDOUT_SEED = 777, 12345
BATCH = 64
WITHOUT_BOX = 0.15
CALLS, CALLS_SEED, CALLING = 80, 2, 0.35
"""(batches, seed, share of answers that call) of the warm start that teaches the calculator's calls."""
PHASES = ((420, 0.2, 0), (100, 0.7, 1))
"""(batches, share of direct answers, seed) of the warm start's phases."""

VOCABULARY = ["<pad>", "<eos>", "\\boxed{", "}", *"0123456789+-*%=,;?:()[]<>|srpbmax "]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Task(NamedTuple):
    """One problem."""

    prompt: str
    steps: str
    answer: str


def draw_sum(rng: random.Random, min_terms: int = 3, max_terms: int = 6) -> Task:
    """Draw one problem; an operation that would leave 0..19 is drawn again."""
    num_terms = rng.randint(min_terms, max_terms)
    value = rng.randrange(10)
    text, steps = str(value), []
    while len(steps) < num_terms - 1:
        operator, digit = rng.choice("++-"), rng.randrange(1, 10)
        result = value + digit if operator == "+" else value - digit
        if 0 <= result < 20:
            text += f"{operator}{digit}"
            steps.append(f"{value}{operator}{digit}={result}")
            value = result
    return Task(f"{text}=?", ",".join(steps), str(value))


def draw_tasks(count: int, seed: int, excluded: Sequence[Task] = ()) -> list[Task]:
    """`count` problems with different prompts, none of them among `excluded`."""
    rng = random.Random(seed)
    seen = {task.prompt for task in excluded}
    tasks: list[Task] = []
    while len(tasks) < count:
        task = draw_sum(rng)
        if task.prompt not in seen:
            seen.add(task.prompt)
            tasks.append(task)
    return tasks


def draw_completions(train: Sequence[Task]) -> Iterator[dict[str, str]]:
    """Rows of the warm start in training order; the end token is the loader's to add."""
    for batches, direct, seed in PHASES:
        rng = random.Random(seed)
        for _ in range(batches * BATCH):
            task = train[rng.randrange(len(train))]
            steps = "" if rng.random() < direct else task.steps
            ending = f"={task.answer}" if rng.random() < WITHOUT_BOX else f"\\boxed{{{task.answer}}}"
            yield {"prompt": task.prompt, "answer": task.answer, "completion": steps + ending}


def draw_calls(train: Sequence[Task]) -> Iterator[dict[str, str]]:
    """Rows that call the calculator in part, with its answer where it will stand, or answer at once."""
    rng = random.Random(CALLS_SEED)
    for _ in range(CALLS * BATCH):
        task = train[rng.randrange(len(train))]
        call = f"<{task.prompt.removesuffix('=?')}>{task.answer};" if rng.random() < CALLING else ""
        yield {"prompt": task.prompt, "answer": task.answer, "completion": f"{call}\\boxed{{{task.answer}}}"}


def write_jsonl(path: Path, tasks: Sequence[Task]) -> None:
    """One `{prompt, answer}` object a line."""
    lines = [json.dumps({"prompt": task.prompt, "answer": task.answer}) for task in tasks]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_parquet(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Text columns, zstd."""
    import pyarrow
    import pyarrow.parquet

    columns = {name: pyarrow.array([row[name] for row in rows], pyarrow.string()) for name in rows[0]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd", compression_level=19)


def model_config() -> dict[str, object]:
    """A Qwen3-MoE of 425,088 parameters."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": len(VOCABULARY),
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 256,
        "use_sliding_window": False,
        "sliding_window": None,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.01,
        "initializer_range": 0.125,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def policy_files() -> dict[str, object]:
    """The untrained policy: its configuration and a tokenizer of single characters, no weights."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": VOCABULARY[i], **special} for i in range(2)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "\\\\boxed\\{|."},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(VOCABULARY)}, "unk_token": ""},
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"eos_token_id": 1, "pad_token_id": 0, "do_sample": True, "temperature": 1.0}
    return {
        "config.json": model_config(),
        "generation_config.json": generation,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }


def write_demo(out: Path, say: Callable[[str], None]) -> list[Path]:
    """Write everything below `out` and return the files, relative to it."""
    data, policy = out / "data", out / "policy_init"
    data.mkdir(parents=True, exist_ok=True)
    policy.mkdir(parents=True, exist_ok=True)
    heldout = draw_tasks(NUM_HELDOUT, HELDOUT_SEED)
    train = draw_tasks(NUM_TRAIN, TRAIN_SEED, heldout)
    write_jsonl(data / "heldout.jsonl", heldout)
    write_jsonl(data / "train.jsonl", train)
    say(f"prompts: {len(train)} to train on, {len(heldout)} held out, all different")
    rows = list(draw_completions(train))
    write_parquet(data / "sft.parquet", rows)
    say(f"warm start: {len(rows)} rows in training order")
    calls = list(draw_calls(train))
    write_parquet(data / "calculator_sft.parquet", calls)
    say(f"warm start with a calculator: {len(calls)} rows in training order")
    for name, value in policy_files().items():
        (policy / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    files = sorted(path for folder in (data, policy) for path in folder.iterdir() if path.is_file())
    return [path.relative_to(out) for path in files]


def differing_files(committed: Path, fresh: Path, files: Sequence[Path]) -> list[Path]:
    """The files of `fresh` that `committed` lacks or has with other content."""
    return [name for name in files if not (committed / name).is_file() or not is_same(committed / name, fresh / name)]


def is_same(left: Path, right: Path) -> bool:
    """Equal bytes; of parquet files that two versions of pyarrow wrote, equal tables."""
    if left.read_bytes() == right.read_bytes() or left.suffix != ".parquet":
        return left.read_bytes() == right.read_bytes()
    from pyarrow import parquet

    writers = {parquet.read_metadata(path).created_by for path in (left, right)}
    return len(writers) > 1 and parquet.read_table(left).equals(parquet.read_table(right))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; the exit status is 1 where a checked file differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEMO, help="folder to write or check (default: configs/demo)")
    parser.add_argument("--check", action="store_true", help="compare the files that are there byte for byte")
    options = parser.parse_args(arguments)
    if not options.check:
        for name in write_demo(options.out, print):
            print(f"wrote {options.out / name} ({(options.out / name).stat().st_size:,} bytes)")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        files = write_demo(Path(folder), print)
        differing = differing_files(options.out, Path(folder), files)
    for name in files:
        print(f"{'DIFFERS' if name in differing else 'same'}: {options.out / name}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
