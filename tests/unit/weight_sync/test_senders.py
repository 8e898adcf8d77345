from __future__ import annotations

import asyncio
import json
import socket

import pytest
import torch
from weight_servers import WeightServerStandIn

from moerl.checksums import checksum
from moerl.errors import ConfigError, WeightSyncError
from moerl.weight_sync.buckets import make_buckets
from moerl.weight_sync.flat import laid_out, pack
from moerl.weight_sync.servers import SenderPlace, is_here
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender
from moerl.weight_sync.transports.distributed import DistributedConfig, DistributedSender
from moerl.weight_sync.transports.tensor import TensorConfig, TensorSender

KINDS = ["disk", "tensor", "distributed"]
LIVE = ["tensor", "distributed"]


def policy(seed: int):
    torch.manual_seed(seed)
    return {
        "scale": torch.rand(3, 1),
        "matrix": torch.randn(6, 5).to(torch.bfloat16),
        "eighth": torch.randn(7, 3).to(torch.float8_e4m3fn),
        "turned": torch.randn(4, 6).T,
        "bias": torch.randn(3).to(torch.bfloat16),
        "number": torch.tensor(float(seed)),
    }


@pytest.fixture
def place(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "torch_dtype": "float32"}))
    (model / "tokenizer.json").write_text("{}")
    return SenderPlace(tmp_path / "weights", model)


def make(kind, place, **options):
    if kind == "disk":
        return DiskSender(DiskConfig(**{"check_every": 0, **options}), place)
    if kind == "tensor":
        return TensorSender(TensorConfig(**{"check_every": 0, **options}), place)
    return DistributedSender(DistributedConfig(**{"check_every": 0, "timeout_seconds": 30.0, **options}), place)


def buckets(weights, version, bucket_bytes=64):
    return list(make_buckets(weights.items(), version=version, bucket_bytes=bucket_bytes, is_summed=False))


async def update(sender, servers, weights, version, bucket_bytes=64):
    """As `Updates` does: servers that failed get no more of it."""
    failures = {}
    for bucket in buckets(weights, version, bucket_bytes):
        left = [server for server in servers if server not in failures]
        failures |= await sender.send(bucket, left)
    left = [server for server in servers if server not in failures]
    return failures | await sender.commit(version, left)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bucket_bytes", [1, 64, 10_000])
def test_weights_arrive_bitwise_at_every_rank(kind, bucket_bytes, place):
    async def run():
        sender = make(kind, place)
        servers = [WeightServerStandIn(1, url="one"), WeightServerStandIn(2, url="two")]
        for version in (1, 2, 5):
            weights = policy(version)
            assert await update(sender, servers, weights, version, bucket_bytes) == {}
            for server in servers:
                assert server.holds(weights)
                assert server.label == str(version)
                assert not server.in_session
        for server in servers:
            per_update = len(server.labels_seen) // 3
            assert server.labels_seen[: per_update - 1] == [None] * (per_update - 1), "the label comes last"
        sender.close()
        assert not place.folder.exists()

    asyncio.run(run())


def test_a_version_is_a_folder_that_is_whole_or_absent_and_two_are_kept_at_most(place):
    async def run():
        sender, server = make("disk", place), WeightServerStandIn()
        seen = set()
        for version in (1, 2, 3):
            for bucket in buckets(policy(version), version):
                await sender.send(bucket, [server])
                present = {path.name for path in place.folder.iterdir()}
                seen |= present
                assert len(present) <= 2
                assert present <= {str(version - 1), f"staging-{version}"}
            await sender.commit(version, [server])
            assert {path.name for path in place.folder.iterdir()} == {str(version)}
        folder = place.folder / "3"
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(policy(3))
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in policy(3).values())
        assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16", "that of most elements"
        assert (folder / "tokenizer.json").is_file()

    asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_is_given_up_leaves_no_session_and_no_file(kind, place):
    async def run():
        sender, servers = make(kind, place, check_every=1), [WeightServerStandIn(), WeightServerStandIn(2)]
        old = policy(1)
        await update(sender, servers, old, 1)
        for bucket in buckets(policy(2), 2)[:-1]:
            await sender.send(bucket, servers)
        await sender.give_up(servers)
        assert {path.name for path in place.folder.iterdir()} == {"1"}
        for server in servers:
            assert not server.in_session
            assert server.label == "1", "the label came with no bucket"
            assert await sender.replay(server, 1), "the old version can be had again"
            assert server.holds(old)
        assert not await sender.replay(servers[0], 2)
        new = policy(2)
        assert await update(sender, servers, new, 2) == {}, "the same version, published again"
        assert all(server.holds(new) for server in servers)

    asyncio.run(run())


ENDPOINTS = {
    "disk": ["disk", "checksum"],
    "tensor": ["begin", "info", "tensor", "end", "disk", "checksum"],
    "distributed": ["begin", "info", "init", "distributed", "end", "disk", "checksum"],
}


@pytest.mark.parametrize(("kind", "endpoint"), [(kind, one) for kind, all_of in ENDPOINTS.items() for one in all_of])
def test_a_server_that_refuses_is_named_or_nobody_took_it(kind, endpoint, place, monkeypatch):
    """Every endpoint in turn. Whoever is not named as failed holds the whole new version under its label."""
    monkeypatch.setattr("moerl.weight_sync.transports.distributed._GRACE_SECONDS", 6.0)

    async def run():
        sender = make(kind, place, check_every=1, **({"timeout_seconds": 4.0} if kind == "distributed" else {}))
        good, bad = (
            WeightServerStandIn(url="good", group_seconds=4.0),
            WeightServerStandIn(url="bad", group_seconds=4.0),
        )
        bad.faults[endpoint] = 0
        weights = policy(1)
        failures = await update(sender, [good, bad], weights, 1)
        if endpoint == "begin":  # asked again, in case a session was left open
            assert bad not in failures or "no session" in str(failures[bad])
        else:
            assert bad in failures
        for server in (good, bad):
            if server not in failures:
                assert server.holds(weights)
                assert (server.label, server.in_session) == ("1", False)
        await sender.give_up([good, bad])
        again = policy(2)
        assert await update(sender, [good, bad], again, 2) == {}
        assert good.holds(again)
        assert bad.holds(again)

    asyncio.run(run())


@pytest.mark.parametrize("kind", LIVE)
def test_the_check_finds_weights_that_a_load_from_disk_would_not_give(kind, place):
    async def run():
        sender, server = make(kind, place, check_every=2), WeightServerStandIn()
        server.damages = True
        with pytest.raises(WeightSyncError, match=r"other weights after the update to version 1 .*rank 0 bias"):
            await update(sender, [server], policy(1), 1)
        await sender.give_up([server])
        server.damages = False
        assert await update(sender, [server], policy(2), 2) == {}
        server.calls.clear()
        await update(sender, [server], policy(3), 3)
        assert "checksum" not in server.calls, "the second is not checked"
        assert not (place.folder / "3").exists()
        await update(sender, [server], policy(4), 4)
        assert server.calls.count("checksum") == 2
        assert (place.folder / "4").exists(), "what a checked update wrote serves those that come back"

    asyncio.run(run())


def test_servers_that_loaded_unlike_weights_from_one_folder_are_found(place):
    async def run():
        sender, servers = make("disk", place, check_every=1), [WeightServerStandIn(url=name) for name in "abc"]
        servers[1].weights["left over"] = torch.ones(1)
        servers[2].weights["matrix"] = torch.zeros(1)
        failures = await update(sender, servers, policy(1), 1)
        assert failures == {}, "other names are another cut of the model, and what was there before is replaced"

        async def loads_badly(*args, **options):
            await WeightServerStandIn.update_from_disk(servers[2], *args, **options)
            servers[2].weights["matrix"][0] += 1

        servers[2].update_from_disk = loads_badly
        failures = await update(sender, servers, policy(2), 2)
        assert set(failures) == {servers[2]}
        assert "c loaded other weights than a from one folder (rank 0 matrix)" in str(failures[servers[2]])

    asyncio.run(run())


def test_a_file_that_does_not_hold_what_was_written_is_found(place):
    async def run():
        sender, server = make("disk", place, check_every=1), WeightServerStandIn()
        for bucket in buckets(policy(1), 1):
            await sender.send(bucket, [server])
        path = max((place.folder / "staging-1").glob("*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(WeightSyncError, match=r"model-\d+.safetensors has checksum \w+ where \w+ was written"):
            await sender.commit(1, [server])
        assert server.calls == [], "nobody loaded it"

    asyncio.run(run())


def test_a_disk_that_refuses_says_where_and_what_to_do(place):
    place.folder.write_text("a file where the folder should be")

    async def run():
        with pytest.raises(WeightSyncError, match=r"weights/staging-1/.* cannot be written .*weight_sync.folder"):
            await make("disk", place).send(buckets(policy(1), 1)[0], [])

    asyncio.run(run())


@pytest.mark.parametrize("kind", LIVE)
def test_a_copy_is_kept_where_that_is_asked_for(kind, place):
    async def run():
        sender, server, late = make(kind, place, keep_copy=True), WeightServerStandIn(), WeightServerStandIn()
        for version in (1, 2):
            await update(sender, [server], policy(version), version)
        assert await sender.replay(late, 2)
        assert late.holds(policy(2))
        assert late.label == "2"
        assert not await sender.replay(late, 1)
        sender.close()

    asyncio.run(run())


def test_a_server_that_dies_in_a_broadcast_costs_the_others_one_bucket(place, monkeypatch):
    monkeypatch.setattr("moerl.weight_sync.transports.distributed._GRACE_SECONDS", 3.0)

    async def run():
        sender = make("distributed", place, timeout_seconds=20.0)
        servers = [WeightServerStandIn(2, url="one"), WeightServerStandIn(url="dies"), WeightServerStandIn(url="three")]
        assert await update(sender, servers, policy(1), 1) == {}
        servers[1].dies_in_broadcast = True
        started = asyncio.get_running_loop().time()
        failures = await update(sender, servers, policy(2), 2)
        assert asyncio.get_running_loop().time() - started < 60, "nobody waits for ever"
        assert set(failures) == {servers[1]}
        assert servers[0].holds(policy(2))
        assert servers[2].holds(policy(2))
        assert servers[0].calls.count("init") == 2, "a new group without it"
        servers[1].dies_in_broadcast = False
        servers[1].in_session = False
        assert await update(sender, servers, policy(3), 3) == {}
        assert all(server.holds(policy(3)) for server in servers)

    asyncio.run(run())


def test_a_fixed_port_serves_every_group_in_turn(place):
    """The group is built again after a refused bucket, at the port where the one before met."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def run():
        sender = make("distributed", place, port=port, timeout_seconds=10.0)
        servers = [WeightServerStandIn(url="one"), WeightServerStandIn(url="two")]
        assert await update(sender, servers, policy(1), 1) == {}
        servers[1].faults["distributed"] = servers[1].calls.count("distributed")
        assert set(await update(sender, servers, policy(2), 2)) == {servers[1]}
        servers[1].in_session = False
        assert await update(sender, servers, policy(3), 3) == {}
        assert all(server.holds(policy(3)) for server in servers)
        await sender.give_up(servers)
        assert await update(sender, servers, policy(4), 4) == {}
        assert servers[0].calls.count("init") == 4
        sender.close()

    asyncio.run(run())


def test_layout_begins_every_tensor_at_a_multiple_of_its_element(place):
    tensors = [("a", torch.ones(3, dtype=torch.uint8)), ("b", torch.rand(5)), ("c", torch.rand(1).bfloat16())]
    tensors.append(("empty", torch.empty(0, 4)))
    entries, ordered = laid_out(tensors)
    assert [entry.name for entry in entries] == ["b", "empty", "c", "a"]
    assert entries[-1].stop == sum(tensor.nbytes for _, tensor in tensors)
    flat = torch.zeros(entries[-1].stop + 9, dtype=torch.uint8)
    pack(entries, ordered, flat)
    for entry, tensor in zip(entries, ordered, strict=True):
        assert entry.start % tensor.element_size() == 0
        back = flat[entry.start : entry.stop].view(entry.dtype).reshape(entry.shape)
        assert checksum([("", back)]) == checksum([("", tensor)])


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (DiskConfig, {"check_every": -1}, "check_every is -1, but must be 0"),
        (TensorConfig, {"check_every": -2}, "check_every is -2"),
        (DistributedConfig, {"backend": "mpi"}, "backend is 'mpi', but must be one of auto, gloo, nccl"),
        (DistributedConfig, {"port": 70000}, "port is 70000, but must be 0 "),
        (DistributedConfig, {"timeout_seconds": 0.0}, "timeout_seconds is 0.0, but must be above 0"),
    ],
)
def test_values_that_cannot_be_are_refused(config, options, words):
    with pytest.raises(ConfigError, match=words):
        config(**options)


def test_an_address_that_is_not_here_is_named(place):
    async def run():
        sender = make("distributed", place, address="192.0.2.1")
        with pytest.raises(WeightSyncError, match=r"cannot listen on 192.0.2.1:0 .*weight_sync.transport.address"):
            await update(sender, [WeightServerStandIn()], policy(1), 1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("http://127.0.0.1:30000", True),
        ("http://localhost:30000", True),
        ("http://[::1]:1", True),
        ("0.0.0.0", True),
        ("http://192.0.2.7:30000", False),  # of the documentation's network
        ("http://no-such-name.invalid:1", True),
    ],
)
def test_whether_an_address_is_of_this_machine(address, here):
    assert is_here(address) == here


@pytest.mark.parametrize(
    ("kind", "words"), [("tensor", "is on another machine, which cannot open"), ("distributed", "is on another one")]
)
def test_servers_elsewhere_are_told_at_once_and_nobody_is_asked(kind, words, place):
    async def run():
        server = WeightServerStandIn()
        server.url = "http://192.0.2.7:30000"
        sender = make(kind, place)
        with pytest.raises(WeightSyncError, match=words):
            await update(sender, [server], policy(1), 1)
        assert "init_group" not in server.calls
        sender.close()

    asyncio.run(run())
