"""One SGLang server (0.5.23): its control endpoints, each answer checked, and `/generate` as it is on the wire.

What goes into `/generate` and what its answer means is in `wire.py`; which server a request goes to in `dispatcher.py`.
Call it from one event loop only. Nothing that a server says is opened, run or unpickled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moerl.errors import WeightSyncError
from moerl.rollout.sglang.connection import MAX_ANSWER_BYTES, Connection
from moerl.rollout.sglang.faults import ServerError, shown

PauseMode = Literal["abort", "retract", "in_place"]
MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
Selector = Literal["target", "draft", "all"]

_FLUSH_PAUSE_SECONDS = 0.2
"""First wait after a refused flush; doubled each time."""


@dataclass(frozen=True)
class ClientTimeouts:
    """Seconds, each of one call."""

    connect_seconds: float = 10.0
    control_seconds: float = 120.0
    """Pause (which waits for what runs), continue, begin, end, flush, memory, checksums."""
    update_seconds: float = 600.0
    """One weight bucket, a load from disk, or the building of a group."""
    health_seconds: float = 25.0
    """The server's own limit for a reply of its scheduler is 20 s; a busy machine needs several."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a server serves now."""

    model_path: str
    """Of the server's own disk; never opened here."""
    weight_version: str
    """Label of the last update; `default` on a server that was started without one."""
    values: Mapping[str, Any]
    """Everything it said."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """How a server was started."""

    version: str
    tensor_size: int
    data_size: int
    """Ranks of attention data parallelism; a request may choose one as `routed_dp_rank`."""
    returns_routes: bool
    context_length: int | None
    """Tokens of prompt and answer that it holds at most; None: it does not say."""
    values: Mapping[str, Any]
    """Everything it said; its `weight_version` is that of the start."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """Of all weights that a server holds."""

    engine: str
    """Equal where two servers of the same layout hold the same weights."""
    ranks: tuple[Mapping[str, str], ...]
    """Per rank: internal tensor name (fused, such as `qkv_proj`) -> checksum."""


class SglangClient:
    """Talks to one server; every failure names the server, the endpoint, what came and what to do."""

    def __init__(
        self,
        url: str,
        *,
        admin_key: str | None = None,
        index: int = 0,
        timeouts: ClientTimeouts | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        """Nothing is connected yet.

        Args:
            url: `http://host:port`.
            admin_key: where the server has one; never logged.
            index: number of the server in its run, for messages and metrics.
            timeouts: None takes the defaults.
            max_answer_bytes: longest answer that is read.

        Raises:
            ConfigError: a URL that is none.
        """
        self.timeouts = timeouts or ClientTimeouts()
        self._connection = Connection(
            url,
            admin_key=admin_key,
            connect_seconds=self.timeouts.connect_seconds,
            max_answer_bytes=max_answer_bytes,
        )
        self.index = index
        self.held_label: str | None = None
        """Goes with updates in place of their version, while not all of the server's memory is there (`lending.py`)."""

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return self._connection.url

    async def generate(self, payload: Mapping[str, Any], *, timeout_seconds: float | None = None) -> Any:
        """The parsed answer to one `/generate`. A call that is cancelled or late drops its socket: send `abort` too.

        Raises:
            ServerError: no whole answer.
        """
        body = await self._connection.post("/generate", payload, seconds=timeout_seconds)
        return self._connection.parsed("/generate", body)

    async def abort(self, rid: str) -> None:
        """End one request; its answer comes with finish reason `abort`. A rid that is not there is no error.

        The server ends every request whose rid *begins* with `rid`, and all of them where it is empty.

        Raises:
            RolloutError: an empty rid, or the server did not take it.
        """
        if not rid:
            raise self._connection.fault("refused", "/abort_request", "an empty rid", "name the request to end")
        await self._connection.post("/abort_request", {"rid": rid}, seconds=self.timeouts.control_seconds)

    async def abort_all(self) -> None:
        """End every request; each is answered with what it has."""
        await self._connection.post("/abort_request", {"abort_all": True}, seconds=self.timeouts.control_seconds)

    async def pause(self, mode: PauseMode) -> None:
        """Take nothing new; `abort` also ends what runs and waits until all of it is answered.

        Raises:
            RolloutError: the server did not pause in time.
        """
        await self._said_ok("/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Take requests again."""
        await self._said_ok("/continue_generation", {})

    async def flush_cache(self, *, max_attempts: int = 5) -> None:
        """Forget every cached prefix, which old weights made. A refusal (400: requests run) is asked again, slower.

        Raises:
            RolloutError: refused each time.
        """
        wait = _FLUSH_PAUSE_SECONDS
        for attempt in range(max_attempts):
            try:
                await self._connection.post("/flush_cache", {}, seconds=self.timeouts.control_seconds)
                return
            except ServerError as fault:
                if fault.kind != "refused" or attempt == max_attempts - 1:
                    raise
            await asyncio.sleep(wait)
            wait *= 2

    async def begin_update(self, *, selector: Selector = "all") -> None:
        """Open the session that tensor and distributed buckets need."""
        await self._update("/begin_weight_update", {"selector": selector}, self.timeouts.control_seconds)

    async def end_update(self) -> None:
        """Close it: the server puts layouts and quantisation in order."""
        await self._update("/end_weight_update", {}, self.timeouts.control_seconds)

    async def update_from_disk(
        self,
        model_path: str,
        *,
        weight_version: int | None = None,
        load_format: str | None = None,
        flush_cache: bool = True,
        keep_pause: bool = False,
    ) -> None:
        """Load a folder that the server can read; it opens and closes its own session.

        Raises:
            WeightSyncError: the server refused; it then loads the folder that it had before.
        """
        body = {"model_path": model_path, "flush_cache": flush_cache, "keep_pause": keep_pause}
        body |= _given(weight_version=self._label(weight_version), load_format=load_format)
        await self._update("/update_weights_from_disk", body)

    async def update_from_tensor(
        self,
        serialized: Sequence[str],
        *,
        load_format: str | None = None,
        weight_version: int | None = None,
        flush_cache: bool = False,
        selector: Selector = "all",
    ) -> None:
        """One bucket, between `begin_update` and `end_update`.

        Args:
            serialized: for each tensor rank the base64 of its serialised tensors.
            load_format: None, `direct` or `flattened_bucket`.
            weight_version: with the last bucket only; a server notes it with any.
            flush_cache: better once after the last bucket (`flush_cache()`).
            selector: which of target and draft model.
        """
        body = {"serialized_named_tensors": list(serialized), "flush_cache": flush_cache, "selector": selector}
        body |= _given(weight_version=self._label(weight_version), load_format=load_format)
        await self._update("/update_weights_from_tensor", body)

    async def init_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Join the process group of weight updates as ranks `rank_offset + tensor rank`; returns once all have."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._update("/init_weights_update_group", body)

    async def update_from_distributed(
        self,
        named: Sequence[tuple[str, str, Sequence[int]]],
        *,
        group_name: str,
        load_format: str | None = None,
        weight_version: int | None = None,
        flush_cache: bool = False,
        selector: Selector = "all",
    ) -> None:
        """One bucket, between `begin_update` and `end_update`; the sender broadcasts while this waits.

        Args:
            named: (name, dtype such as `bfloat16`, shape) in the order of the broadcast.
            group_name: of `init_group`.
            load_format: None for a broadcast per tensor, or `flattened_bucket`.
            weight_version: with the last bucket only.
            flush_cache: better once after the last bucket.
            selector: which of target and draft model.
        """
        body: dict[str, Any] = {
            "names": [name for name, _, _ in named],
            "dtypes": [dtype for _, dtype, _ in named],
            "shapes": [list(shape) for _, _, shape in named],
            "group_name": group_name,
            "flush_cache": flush_cache,
            "selector": selector,
        }
        body |= _given(weight_version=self._label(weight_version), load_format=load_format)
        await self._update("/update_weights_from_distributed", body)

    async def destroy_group(self, group_name: str) -> None:
        """Leave the process group."""
        await self._update("/destroy_weights_update_group", {"group_name": group_name}, self.timeouts.control_seconds)

    async def relabel(self, label: str) -> None:
        """Change the label of the weights alone; nothing is aborted."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._update("/update_weight_version", body, self.timeouts.control_seconds)

    async def checksum(self, *, selector: Selector = "all") -> Checksum:
        """Of the weights that the server holds.

        Raises:
            WeightSyncError: none came.
        """
        endpoint = "/weights_checker"
        answer = await self._update(endpoint, {"action": "checksum", "selector": selector})
        engine, ranks = answer.get("per_engine_checksum"), answer.get("ranks")
        tables = [rank.get("checksums") if isinstance(rank, dict) else None for rank in ranks or ()]
        if not isinstance(engine, str) or not tables or not all(isinstance(table, dict) for table in tables):
            raise WeightSyncError(str(self._shape_fault(endpoint, answer, "per_engine_checksum and ranks[].checksums")))
        return Checksum(engine, tuple(table for table in tables if table is not None))

    async def check_health(self) -> None:
        """Have the server's scheduler answer; takes a second or more.

        Raises:
            ServerError: it did not; of kind `lost` where its process may be gone.
        """
        await self._connection.post("/health", None, seconds=self.timeouts.health_seconds, method="GET")

    async def model_info(self) -> ModelInfo:
        """What is served, and the live label of its weights."""
        endpoint = "/model_info"
        values = await self._get(endpoint)
        path, version = values.get("model_path"), values.get("weight_version")
        if not isinstance(path, str) or not isinstance(version, str | int):
            raise self._shape_fault(endpoint, values, "model_path and weight_version")
        return ModelInfo(path, str(version), values)

    async def server_info(self) -> ServerInfo:
        """How the server was started."""
        endpoint = "/server_info"
        values = await self._get(endpoint)
        version, tensor = values.get("version"), values.get("tp_size")
        data = values.get("attn_dp_size") or values.get("dp_size") or 1
        if not isinstance(version, str) or not isinstance(tensor, int) or not isinstance(data, int):
            raise self._shape_fault(endpoint, values, "version, tp_size and dp_size")
        limits = [values.get(name) for name in ("context_length", "max_total_num_tokens")]
        context = min((limit for limit in limits if type(limit) is int and limit > 0), default=None)
        returns_routes = values.get("enable_return_routed_experts") is True
        return ServerInfo(version, tensor, data, returns_routes, context, values)

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Give memory back; the server must be idle (paused by `abort`), or it dies. Released weights are lost.

        Raises:
            RolloutError: no tags (which would be all), or the server refused.
        """
        await self._memory("/release_memory_occupation", tags)

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take it again; weights are garbage until they are sent."""
        await self._memory("/resume_memory_occupation", tags)

    async def close(self) -> None:
        """Close the sockets. Another call opens new ones."""
        await self._connection.close()

    async def _memory(self, endpoint: str, tags: Sequence[MemoryTag]) -> None:
        if not tags:
            raise self._connection.fault("refused", endpoint, "no tags, which would mean all", "name them")
        await self._connection.post(endpoint, {"tags": list(tags)}, seconds=self.timeouts.control_seconds)

    async def _get(self, endpoint: str) -> dict[str, Any]:
        body = await self._connection.post(endpoint, None, seconds=self.timeouts.control_seconds, method="GET")
        return self._object(endpoint, self._connection.parsed(endpoint, body))

    async def _said_ok(self, endpoint: str, body: Mapping[str, Any]) -> None:
        answer = self._object(
            endpoint,
            self._connection.parsed(
                endpoint, await self._connection.post(endpoint, body, seconds=self.timeouts.control_seconds)
            ),
        )
        if answer.get("status") != "ok":
            raise self._shape_fault(endpoint, answer, 'status "ok"')

    async def _update(self, endpoint: str, body: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """The answer of an endpoint that says `success`.

        Raises:
            WeightSyncError: no answer, or `success` is not true.
        """
        limit = self.timeouts.update_seconds if seconds is None else seconds
        return await _as_sync_error(self._succeeded(endpoint, body, limit))

    async def _succeeded(self, endpoint: str, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        raw = await self._connection.post(endpoint, body, seconds=seconds)
        answer = self._object(endpoint, self._connection.parsed(endpoint, raw))
        if answer.get("success") is False:
            came = f"success false: {shown(str(answer.get('message', 'no words')))}"
            raise self._connection.fault("refused", endpoint, came, "the update did not happen; see the server's log")
        if answer.get("success") is not True:
            raise self._shape_fault(endpoint, answer, "success")
        return answer

    def _label(self, version: int | None) -> str | None:
        return None if version is None else self.held_label or str(version)

    def _object(self, endpoint: str, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, dict):
            raise self._shape_fault(endpoint, answer, "a JSON object")
        return answer

    def _shape_fault(self, endpoint: str, answer: Any, expected: str) -> ServerError:
        keys = sorted(answer) if isinstance(answer, dict) else type(answer).__name__
        came = f"an answer without {expected} (it has {shown(str(keys))})"
        return self._connection.fault("bad_answer", endpoint, came, "check that the server is SGLang 0.5.23")


async def _as_sync_error(call: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    try:
        return await call
    except ServerError as fault:
        raise WeightSyncError(str(fault)) from fault


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
