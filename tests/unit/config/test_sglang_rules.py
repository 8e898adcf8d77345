"""Rules of `rollout.engine: {name: sglang}` that need no torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moerl.config.rollout_rules import colocated
from moerl.config.rules import sglang
from moerl.config.schema import RunConfig

URLS = {"name": "sglang", "urls": ["http://127.0.0.1:30000"]}


def faults(engine: dict, *, routing: str = "none", **sampling: float) -> list[str]:
    cfg = RunConfig()
    algorithm = replace(cfg.algorithm, routing=routing)
    return list(sglang(replace(cfg, rollout=replace(cfg.rollout, engine=engine, **sampling), algorithm=algorithm)))


def masking(tokens: int | None) -> dict:
    return {"name": "sglang", "servers": {"sampling_mask_max_tokens": tokens}}


def colocated_faults(engine: dict, *, max_staleness: int = 0, pretrain_steps: int = 0) -> list[str]:
    cfg = RunConfig()
    critic = replace(cfg.algorithm.critic, pretrain_steps=pretrain_steps)
    rollout = replace(cfg.rollout, engine=engine, max_staleness=max_staleness)
    return list(colocated(replace(cfg, rollout=rollout, algorithm=replace(cfg.algorithm, critic=critic))))


SAVERS = [{**URLS, "release_memory": True}, {"name": "sglang", "servers": {"memory_saver": True}}]


@pytest.mark.parametrize("engine", SAVERS)
def test_memory_is_lent_where_nothing_needs_the_engine_meanwhile(engine):
    assert colocated_faults(engine) == []
    assert colocated_faults(URLS, max_staleness=1, pretrain_steps=5) == []
    (ahead,) = colocated_faults(engine, max_staleness=1)
    assert "with rollout.max_staleness=1 it generates meanwhile: set rollout.max_staleness to 0" in ahead
    (held,) = colocated_faults(engine, pretrain_steps=5)
    assert "algorithm.critic.pretrain_steps=5 update no policy: set it to 0" in held


def test_good_ones_pass():
    assert faults(URLS, routing="R3", top_k=4096) == []
    assert faults({"name": "sglang", "servers": {}}) == []
    assert faults({"name": "sglang", "servers": {"quantization": "none", "kv_cache_dtype": "fp8_e4m3"}}) == []
    assert faults({"name": "local"}, top_k=5000) == []
    assert faults(masking(100), top_p=0.9, top_k=100) == faults(masking(None), top_p=0.9) == []
    assert faults(masking(100)) == faults(masking(8000), top_p=0.9) == []


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        ({"name": "sglang"}, {}, "needs either urls of servers that run"),
        ({**URLS, "servers": {}}, {}, "needs either urls of servers that run"),
        ({**URLS, "pause_mode": "retract"}, {"routing": "R3"}, "pause_mode is 'retract' with algorithm.routing=R3"),
        ({**URLS, "routes": "never"}, {"routing": "R3"}, "rollout.engine.routes is never"),
        ({"name": "sglang", "servers": {"quantization": "fp8"}}, {}, "servers.quantization is 'fp8', but SGLang quant"),
        (URLS, {"top_k": 5000}, "rollout.top_k is 5000, but SGLang"),
        (masking(100), {"top_k": 200}, "for at most 100: lower it"),
        (masking(100), {"top_p": 0.9}, "rollout.top_p is 0.9 without top_k, which asks for 4096 tokens"),
    ],
)
def test_bad_ones_are_told(engine, options, words):
    found = faults(engine, **options)
    assert len(found) == 1
    assert words in found[0]
