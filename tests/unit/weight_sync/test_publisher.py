from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from moerl.checksums import checksum, verify_bucket
from moerl.errors import ConfigError, NumericsError, RolloutError, WeightSyncError
from moerl.types import Completion, SamplingParams, WeightBucket
from moerl.weight_sync.buckets import make_buckets
from moerl.weight_sync.publisher import Publisher
from moerl.weight_sync.transport import transports
from moerl.weight_sync.transports.in_process import InProcess, InProcessConfig

WEIGHTS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.tensor(2.5, dtype=torch.float64),
    "d": torch.arange(40, dtype=torch.int64).reshape(2, 4, 5).transpose(0, 2),
}


class RecordingEngine:
    """Keeps the engine protocol: stages buckets, takes them over with the last one, and notes what was asked of it."""

    def __init__(self, *, fail_on: str | None = None, error: Exception | None = None) -> None:
        self.weights: dict[str, Tensor] = {"old": torch.zeros(1)}
        self.version = 0
        self.calls: list[str] = []
        self.is_paused = False
        self.staged: dict[str, Tensor] = {}
        self.fail_on = fail_on
        self.error = error or RolloutError("the engine broke")

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fail_on:
            self.fail_on = None
            raise self.error

    async def generate(self, token_ids: np.ndarray, params: SamplingParams, request_id: str) -> Completion:
        raise RolloutError("this engine generates nothing")

    async def pause(self) -> None:
        self.is_paused = True
        self.note("pause")

    async def resume(self) -> None:
        self.note("resume")
        self.staged = {}
        self.is_paused = False

    async def update_weights(self, bucket: WeightBucket) -> None:
        assert self.is_paused
        verify_bucket(bucket)
        self.note("last" if bucket.is_last else "bucket")
        for name, tensor in bucket.tensors:
            assert name not in self.staged
            self.staged[name] = tensor
        if bucket.is_last:
            self.weights, self.staged, self.version = self.staged, {}, bucket.version

    async def set_memory(self, *, released: bool) -> None:
        self.note(f"memory {released}")

    def close(self) -> None:
        self.note("close")


class DamagingTransport:
    """Flips one bit of every tensor on the way."""

    def __init__(self) -> None:
        self.inner = InProcess(InProcessConfig())

    async def send(self, bucket: WeightBucket, engines) -> None:
        damaged = [(name, tensor.clone()) for name, tensor in bucket.tensors]
        for _, tensor in damaged:
            tensor.reshape(-1)[:1].view(torch.uint8)[0] ^= 1
        await self.inner.send(replace(bucket, tensors=damaged), engines)

    def close(self) -> None:
        self.inner.close()


def make_publisher(*engines: RecordingEngine, bucket_bytes: int = 64, transport=None, **options) -> Publisher:
    return Publisher(engines, transport or InProcess(InProcessConfig()), bucket_bytes, **options)


def publish(publisher: Publisher, tensors=None, version: int = 1):
    return asyncio.run(publisher.publish((WEIGHTS if tensors is None else tensors).items(), version))


@pytest.mark.parametrize("bucket_bytes", [1, 58, 64, 10_000])
def test_stream_arrives_bitwise_and_raises_the_version_once(bucket_bytes):
    engines = [RecordingEngine(), RecordingEngine()]
    metrics = publish(make_publisher(*engines, bucket_bytes=bucket_bytes))
    for engine in engines:
        assert engine.version == 1
        assert list(engine.weights) == list(WEIGHTS)
        for name, tensor in WEIGHTS.items():
            assert engine.weights[name].dtype == tensor.dtype
            assert torch.equal(engine.weights[name], tensor)
        assert engine.calls[0] == "pause"
        assert engine.calls[-2:] == ["last", "resume"]
        assert engine.calls.count("last") == 1
        assert not engine.is_paused
    assert metrics["sync/bytes"].value() == sum(tensor.nbytes for tensor in WEIGHTS.values())
    seconds = metrics["perf/sync_seconds"].value()
    assert seconds is not None
    assert 0 < seconds < 60


def test_engines_own_what_they_get():
    source = {"a": torch.ones(3)}
    engines = [RecordingEngine(), RecordingEngine()]
    publish(make_publisher(*engines), source)
    source["a"].zero_()
    engines[0].weights["a"].fill_(7)
    assert engines[1].weights["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("where", ["pause", "bucket", "last"])
@pytest.mark.parametrize(
    "error", [RolloutError("the engine broke"), ConnectionResetError("gone"), RuntimeError("shape")]
)
def test_a_failure_keeps_the_old_weights_resumes_and_can_be_repeated(where, error):
    healthy, broken = RecordingEngine(), RecordingEngine(fail_on=where, error=error)
    publisher = make_publisher(broken, healthy)
    with pytest.raises(WeightSyncError, match=str(error)):
        publish(publisher)
    for engine in (healthy, broken):
        assert engine.version == 0
        assert list(engine.weights) == ["old"]
        assert not engine.is_paused
    assert publisher.version is None
    publish(publisher)
    assert broken.version == healthy.version == 1
    assert torch.equal(broken.weights["d"], WEIGHTS["d"])


def test_a_failure_at_the_last_bucket_says_that_engines_may_differ_and_a_repeat_heals_it():
    healthy, broken = RecordingEngine(), RecordingEngine(fail_on="last")
    publisher = make_publisher(healthy, broken)
    with pytest.raises(WeightSyncError, match="some engines may hold the new version"):
        publish(publisher)
    assert (healthy.version, broken.version) == (1, 0)
    publish(publisher)
    assert (healthy.version, broken.version) == (1, 1)


def test_failed_resume_is_reported_after_all_engines_were_tried():
    engines = [RecordingEngine(fail_on="resume"), RecordingEngine()]
    with pytest.raises(
        WeightSyncError, match=r"cannot resume 1 of 2 engines for version 1.*engine 0: the engine broke"
    ):
        publish(make_publisher(*engines))
    assert not engines[1].is_paused


def test_damage_on_the_way_is_noticed():
    engine = RecordingEngine()
    with pytest.raises(WeightSyncError, match=r"checksum .* damaged on the way"):
        publish(make_publisher(engine, transport=DamagingTransport()))
    assert engine.version == 0
    assert not engine.is_paused


def test_an_error_of_the_trainer_travels_and_engines_resume():
    def stream() -> Iterator[tuple[str, Tensor]]:
        yield from list(WEIGHTS.items())[:3]
        raise NumericsError("nan in the export")

    engine = RecordingEngine()
    publisher = make_publisher(engine)
    with pytest.raises(NumericsError, match="nan in the export"):
        asyncio.run(publisher.publish(stream(), 1))
    assert engine.version == 0
    assert not engine.is_paused
    assert "bucket" in engine.calls  # some of the stream had been sent, and resume dropped it
    publish(publisher)
    assert engine.version == 1
    assert list(engine.weights) == list(WEIGHTS)


def test_names_must_be_the_expected_ones():
    engine = RecordingEngine()
    publisher = make_publisher(engine, expected_names=["a", "b", "d", "e"])
    with pytest.raises(WeightSyncError, match="missing e; unexpected c;"):
        publish(publisher)
    assert "last" not in engine.calls
    assert engine.version == 0


def test_versions_rise():
    publisher = make_publisher(RecordingEngine())
    publish(publisher, version=3)
    for version in (3, 2):
        with pytest.raises(WeightSyncError, match=f"version {version} was to be published after 3"):
            publish(publisher, version=version)
    publish(publisher, version=4)
    assert publisher.version == 4


def test_updates_never_overlap():
    engine = RecordingEngine()
    publisher = make_publisher(engine, bucket_bytes=1)

    async def both() -> None:
        await asyncio.gather(publisher.publish(WEIGHTS.items(), 1), publisher.publish(WEIGHTS.items(), 2))

    asyncio.run(both())
    once = ["pause", "bucket", "bucket", "bucket", "last", "resume"]
    assert engine.calls == once * 2
    assert engine.version == 2


def test_a_publisher_needs_engines_and_bytes():
    with pytest.raises(ConfigError, match="at least one rollout engine"):
        make_publisher()
    with pytest.raises(ConfigError, match=r"weight_sync\.bucket_bytes is 0"):
        make_publisher(RecordingEngine(), bucket_bytes=0)


def test_the_transport_is_found_by_name():
    plugin, config = transports.resolve({"name": "in_process"})
    assert type(plugin.target(config)).__name__ == "InProcess"
    with pytest.raises(ConfigError, match="no weight transport is called 'in_proces'; did you mean 'in_process'"):
        transports.get("in_proces")


@pytest.mark.parametrize("limit", [8, 40, 1000])
def test_buckets_are_bounded_ordered_and_only_the_last_is_last(limit):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 9, (50,), generator=generator).tolist()
    stream = [(f"w{i}", torch.full((size,), i, dtype=torch.float32)) for i, size in enumerate(sizes)]
    buckets = list(make_buckets(stream, version=9, bucket_bytes=limit))
    assert [name for bucket in buckets for name, _ in bucket.tensors] == [name for name, _ in stream]
    assert [bucket.is_last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    assert {bucket.version for bucket in buckets} == {9}
    for bucket in buckets:
        total = sum(tensor.nbytes for _, tensor in bucket.tensors)
        assert total <= limit or len(bucket.tensors) == 1
        assert bucket.checksum == checksum(bucket.tensors)
    for left, right in itertools.pairwise(buckets):
        assert sum(t.nbytes for _, t in left.tensors) + right.tensors[0][1].nbytes > limit  # no bucket is cut early


def test_empty_and_repeated_streams_are_refused():
    with pytest.raises(WeightSyncError, match="version 1 has no tensors"):
        list(make_buckets([], version=1, bucket_bytes=8))
    twice = [("a", torch.zeros(1)), ("a", torch.zeros(1))]
    with pytest.raises(WeightSyncError, match="'a' came twice"):
        list(make_buckets(twice, version=1, bucket_bytes=8))


def test_checksum_sees_name_dtype_shape_order_and_bytes():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    base = checksum([("a", a), ("b", b)])
    others = [
        checksum([("x", a), ("b", b)]),
        checksum([("b", b), ("a", a)]),
        checksum([("a", a.reshape(2, 1)), ("b", b)]),
        checksum([("a", a.view(torch.int32)), ("b", b)]),
        checksum([("a", torch.tensor([1.0, 2.0000002])), ("b", b)]),
        checksum([("a", a)]),
    ]
    assert len({base, *others}) == len(others) + 1
    assert checksum([("z", torch.tensor([0.0]))]) != checksum([("z", torch.tensor([-0.0]))])


def test_checksum_ignores_strides_and_takes_every_dtype():
    wide = torch.arange(12.0).reshape(3, 4)
    assert checksum([("w", wide.T)]) == checksum([("w", wide.T.contiguous())])
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint8):
        assert checksum([("w", wide.to(dtype))]) == checksum([("w", wide.to(dtype).clone())])
    assert checksum([("w", torch.zeros(0, 3))]) != checksum([("w", torch.zeros(3, 0))])
