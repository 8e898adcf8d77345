"""`moerl fake-engine`: a server that speaks SGLang's API without a model."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

from moerl.errors import ConfigError
from moerl.rollout.fake_engine.fault_rules import KINDS
from moerl.rollout.fake_engine.settings import FakeEngineConfig

logger = logging.getLogger(__name__)

HELP = """Serve SGLang's HTTP API (0.5.23) without a model, for tests of what talks to it.

  moerl fake-engine --port 30000                                 on 127.0.0.1; its URL is the first line it prints
  moerl fake-engine --token-seconds 0.01 --lengths lognormal:200,0.8     answers that take their time, with a long tail
  moerl fake-engine --num-layers 48 --num-experts 128 --experts-per-token 8      routes of another model's shape
  moerl fake-engine --faults '[{"kind": "status", "status": 503, "times": 3}]'    the first three requests are refused

A run against it (CONFIG: configs/demo/gspo.yaml, to whose policy these numbers belong):

  moerl fake-engine --port 30000 --vocab-size 38 --num-layers 2 --num-experts 16 --experts-per-token 2
  moerl train CONFIG weight_sync.transport=disk 'rollout.engine={name: sglang, urls: ["http://127.0.0.1:30000"]}'

Tokens, logprobs and routes are pure functions of the weights' label, the seed and the position, so a test knows what
must come. Faults are rules: each has a kind, an endpoint (/generate), and how many calls it hits (`times`, `after`,
`every`). POST /fake/faults replaces them, POST /fake/restart crashes the server, GET /fake/state tells what was asked.
docs/fake_engine.md has examples. Kinds of faults:

""" + "\n".join(f"  {kind:<16} {text}" for kind, text in KINDS.items())

_TEXTS = {
    "host": "address to listen on; anything but loopback is open to others",
    "port": "0: any free one",
    "admin_key": "key that control endpoints ask for; empty: none",
    "vocab_size": "token ids are below it",
    "num_layers": "layers in routes, dense ones included",
    "dense_layers": "so many of the first have no router; their slots stay 0",
    "num_experts": "experts of a layer",
    "experts_per_token": "of them, in routes",
    "returns_routes": "as --enable-return-routed-experts; without it nothing is returned, and no error",
    "memory_saver": "as --enable-memory-saver; without it memory is released in name alone",
    "context_length": "tokens of prompt and answer together that are allowed",
    "eos_token_id": "the end token",
    "data_size": "ranks of attention data parallelism",
    "tensor_size": "tensor-parallel ranks that it claims",
    "weight_version": "label at the start, and after a restart",
    "max_running_requests": "more wait in the queue",
    "lengths": "tokens of prompt and answer at which the end token comes: fixed:N, uniform:A,B, lognormal:MEDIAN,SIGMA",
    "token_seconds": "time of one token",
    "prefill_token_seconds": "time of one token of a prompt",
    "update_seconds": "time of one weight bucket, or of one load from disk",
    "health_seconds": "time of a health check; a real server takes 1 s or more",
    "is_constant": "every label is the same model, as of a policy that does not move",
    "seed": "another seed is another model",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option per field of `FakeEngineConfig`."""
    for field in dataclasses.fields(FakeEngineConfig):
        option, text = "--" + field.name.replace("_", "-"), _TEXTS[field.name]
        default: Any = field.default
        if isinstance(default, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default, help=text)
        else:
            shown = f"{text} (default {default!r})"
            parser.add_argument(option, type=type(default), default=default, metavar="X", help=shown)
    parser.add_argument("--faults", default="[]", metavar="JSON", help="rules, as JSON or as @FILE")


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from moerl.rollout.fake_engine.serving import serve

    cfg = FakeEngineConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(FakeEngineConfig)})
    rules = _read_faults(args.faults)

    def say(url: str, _: object) -> None:
        sys.stdout.write(url + "\n")
        sys.stdout.flush()
        logger.info("serving on %s; stop it with Ctrl-C", url)

    try:
        asyncio.run(serve(cfg, rules, say))
    except KeyboardInterrupt:
        return 0
    return 0


def _read_faults(text: str) -> list[dict[str, Any]]:
    from moerl.rollout.fake_engine.fault_rules import read_rules

    try:
        source = Path(text[1:]).read_text() if text.startswith("@") else text
        values = json.loads(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--faults is {text[:80]!r}, but must be a JSON list or @FILE of one ({error})") from error
    read_rules(values)
    return values
