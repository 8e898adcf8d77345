"""Servers whose routes are not those of their tokens, or that weights would not reach, are refused before any work."""

from __future__ import annotations

import asyncio

import pytest

from moerl.errors import RolloutError
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.sglang.arguments import SglangServerConfig, faults
from moerl.rollout.sglang.client import ServerInfo, SglangClient
from moerl.rollout.sglang.route_support import EXCHANGES_WITH_ROUTES, RUNNERS_WITHOUT_ROUTES
from moerl.rollout.sglang.suited import look_at_servers, refuse_unsuited

RUNNING = [
    *(
        ({"moe_runner_backend": name}, rf"MoE runner {name}, which .* --moe-runner-backend triton")
        for name in RUNNERS_WITHOUT_ROUTES
    ),
    ({"moe_a2a_backend": "mooncake"}, "--moe-a2a-backend mooncake, .* start it with one of none, deepep, deepep_v2"),
    ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache: the routes of a prefix .* start it without"),
    ({"enable_lmcache": True}, "--enable-lmcache: the routes of a prefix .* start it without"),
    ({"enable_flexkv": True}, "--enable-flexkv: the routes of a prefix .* start it without"),
    ({"radix_cache_backend": "lmcache"}, "--radix-cache-backend lmcache: the routes of a prefix .* start it without"),
    ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode: a server that takes over .* start it without"),
    ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE, whose draft model's router .* without"),
    ({"pp_size": 2}, "--pp-size 2, but only the first stage's routes come back"),
]
CONFIGURED = [
    ({"moe_runner_backend": "triton_kernel"}, "moe_runner_backend is 'triton_kernel', which chooses experts inside"),
    ({"moe_runner_backend": "flashinfer_trtllm"}, "returns no routes of its own (R3); use triton"),
    ({"moe_a2a_backend": "pplx", "tensor": 2, "expert": 2}, "moe_a2a_backend is 'pplx', with which SGLang returns"),
    ({"pipeline": 2}, "pipeline is 2, but must be 1 where routes are replayed (R3)"),
]


def look(*, routes=True, live=False, saver=False, **values):
    info = ServerInfo("0.5.23", 1, 1, True, None, values)
    refuse_unsuited(
        "http://a", info, needs_routes=routes, needs_memory_saver=saver, is_sent_live=live, longest_tokens=1
    )


@pytest.mark.parametrize(("values", "words"), RUNNING)
def test_a_running_server_whose_routes_are_others_is_refused(values, words):
    with pytest.raises(RolloutError, match=words):
        look(**values)
    look(routes=False, **values)


@pytest.mark.parametrize("exchange", EXCHANGES_WITH_ROUTES)
def test_those_whose_routes_are_right_are_not(exchange):
    look(moe_runner_backend="triton", moe_a2a_backend=exchange, pp_size=1, enable_hierarchical_cache=False)
    look(speculative_algorithm=None, enable_lmcache=False, radix_cache_backend=None, disaggregation_mode="null")
    look()


def test_a_draft_model_is_refused_where_memory_is_released():
    """Pitfall 18: released weights are lost, and an update has none of the draft's."""
    draft = {"routes": False, "enable_memory_saver": True, "speculative_algorithm": "EAGLE"}
    with pytest.raises(RolloutError, match=r"--speculative-algorithm EAGLE, but .*release_memory is on: the draft"):
        look(saver=True, **draft)
    look(saver=False, **draft)
    look(saver=True, **{**draft, "speculative_algorithm": None})


@pytest.mark.parametrize(("version", "warnings"), [("0.5.22", 1), ("0.5.23", 0)])
def test_another_version_is_warned_of(version, warnings, monkeypatch, caplog):
    """Pitfalls 6 and 7: routes under attention data parallelism and DeepEP are other ones in some versions."""
    monkeypatch.setattr("moerl.rollout.fake_engine.app.VERSION", version)
    with FakeServer() as server:

        async def main():
            client = SglangClient(server.url)
            needs = {"needs_routes": True, "needs_memory_saver": False, "is_sent_live": False, "longest_tokens": 1}
            try:
                return await look_at_servers([client], 0, **needs)
            finally:
                await client.close()

        _, (info,) = asyncio.run(main())
        assert info.version == version
        said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert said == [f"{server.url} is SGLang 0.5.22; moerl is tested with 0.5.23"] * warnings


def test_stages_are_refused_where_weights_come_live():
    with pytest.raises(RolloutError, match=r"one pipeline stage alone by this weight_sync\.transport"):
        look(routes=False, live=True, pp_size=2)
    look(routes=False, live=False, pp_size=2)
    look(routes=False, live=True, pp_size=1)


@pytest.mark.parametrize(("fields", "words"), CONFIGURED)
def test_what_would_return_other_routes_is_not_launched(fields, words):
    config = SglangServerConfig(**fields)
    (fault,) = faults(config, has_cuda=True, returns_routes=True)
    assert words in fault
    assert list(faults(config, has_cuda=True, returns_routes=False)) == []
