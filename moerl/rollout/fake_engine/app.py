"""The HTTP side of a fake server: SGLang's endpoints, status codes and answers, faults, and `/fake/*` to steer it.

What is simplified: one request per `/generate` (no batch, no `n`, no stream), a token's text is its number and a blank,
a stop string is looked for in all of an answer's text, a prefix is in the cache only where the same prompt came before,
the content of weight buckets is hashed and not read, and a health check of a paused server says 503 at once where the
real one does so after 20 s. What kills SGLang's scheduler, and its server with it, is a crash here too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from moerl.errors import ConfigError
from moerl.rollout.fake_engine.broken_answers import cut, endless, mangled
from moerl.rollout.fake_engine.fault_rules import FaultRule, read_rules, spoiled
from moerl.rollout.fake_engine.open_calls import OpenCalls
from moerl.rollout.fake_engine.request_rules import refusal
from moerl.rollout.fake_engine.server_state import ServerState

VERSION = "0.5.23"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_OPEN = ("/health", "/health_generate", "/ready", "/fake")
_NORMAL = ("/generate", "/model_info", "/server_info")
_MAX_BODY_BYTES = 1 << 32
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
RULES = web.RequestKey("rules", list[FaultRule])
"""The faults that a call meets."""


class FakeApp:
    """Routes of one server over its state."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self._away_until = 0.0
        self._open = OpenCalls()

    def build(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._open.watch, self._guard])
        posts: dict[str, Handler] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_tensor": self._from_tensor,
            "/update_weights_from_distributed": self._from_distributed,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/update_weight_version": self._set_version,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._take,
            "/weights_checker": self._checksum,
            "/fake/faults": self._set_faults,
            "/fake/restart": self._restart,
        }
        gets: dict[str, Handler] = {
            "/health": self._health,
            "/health_generate": self._health,
            "/ready": self._ready,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/flush_cache": self._flush,
            "/fake/state": self._described,
        }
        for path, handler in posts.items():
            app.router.add_post(path, handler)
        for path, handler in gets.items():
            app.router.add_get(path, handler)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Away, key, and the faults that need no answer of the endpoint."""
        path = request.path
        if path.startswith("/fake"):
            return await handler(request)
        if time.monotonic() < self._away_until:
            return cut(request)
        key = self.state.cfg.admin_key
        if key and not path.startswith(_OPEN) and path not in _NORMAL and not _has_key(request, key):
            return web.json_response({"error": "Unauthorized"}, status=401)
        rules = self.state.struck(path)
        if path not in _NORMAL:
            self.state.calls.append(path)
        request[RULES] = rules
        for rule in rules:
            if rule.kind in ("slow", "hang"):
                await asyncio.sleep(rule.seconds if rule.kind == "slow" else 1e9)
            if rule.kind == "endless":
                return await endless(request, rule.status)
            if (early := self._early(request, rule)) is not None:
                return early
        response = await handler(request)
        return await mangled(request, response, rules)

    def _early(self, request: web.Request, rule: FaultRule) -> web.StreamResponse | None:
        if rule.kind == "restart":
            self.crash(rule.seconds)
        if rule.kind in ("restart", "drop"):
            return cut(request)
        if rule.kind == "no_json":
            return web.Response(text="<html>no JSON</html>", content_type="text/html")
        if rule.kind == "duplicate" and self.state.last_answer:
            return web.Response(body=self.state.last_answer, content_type="application/json")
        canned: dict[str, tuple[dict[str, Any], int]] = {
            "status": ({"error": {"message": "a fault that was asked for"}}, rule.status),
            "refuse": ({"success": False, "message": "a refusal that was asked for"}, 400),
            "forget": ({"success": True, "message": "forgotten, as was asked for", "status": "ok"}, 200),
        }
        return _json(*canned[rule.kind]) if rule.kind in canned else None

    def crash(self, seconds: float) -> None:
        self._away_until = time.monotonic() + seconds
        self._open.cut()  # before anything of the new process can answer them
        self.state.restart()

    # generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        state, rules = self.state, request[RULES]
        body = orjson.loads(await request.read())
        for rule in rules:
            if rule.kind == "ignore":
                for key in rule.keys:
                    body.pop(key, None)
                    body.get("sampling_params", {}).pop(key, None)
        if (words := refusal(body, state)) is not None:
            return _json({"error": {"message": words}}, 400)
        restarts = state.num_restarts
        while state.paused:
            await state.resumed.wait()
        if state.lacks_memory():
            return self._died(request)
        running = state.open(body["rid"], body["input_ids"], body)
        try:
            while not running.is_done:
                running.changed.clear()
                running.settle(time.monotonic())
                if not running.is_done:
                    await _wait(running.changed, running.seconds_left() if running.started is not None else None)
        finally:
            state.close(running)
        if state.num_restarts != restarts:
            return cut(request)
        answer = running.answer(state.label)
        state.counts["route_rows"] += running.rows_sent
        whole = orjson.dumps(answer)
        if not rules:
            state.last_answer = whole
            return web.Response(body=whole, content_type="application/json")
        row_bytes = 4 * state.cfg.num_layers * state.cfg.experts_per_token
        return web.Response(  # the standard library writes NaN, orjson null
            body=json.dumps(spoiled(answer, rules, row_bytes)).encode(), content_type="application/json"
        )

    async def _abort(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        rid, everything = body.get("rid") or "", body.get("abort_all") is True
        if everything or rid in self.state.running:
            self.state.abort(rid, everything=everything)
        return web.Response()

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        mode = (await _body(request)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return _json({"error": {"message": f"mode {mode!r}"}}, 422)
        await asyncio.shield(self.state.pause(mode))  # it goes on there when the client has gone
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.StreamResponse:
        async with self.state.door:
            if self.state.running and self.state.lacks_memory():
                return self._died(request)
            self.state.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, request: web.Request) -> web.StreamResponse:
        if not self.state.is_idle():
            return web.Response(text="Flush cache failed.\n", status=400)
        self.state.cache.clear()
        return web.Response(text="Cache flushed.\n")

    # weights

    async def _begin(self, request: web.Request) -> web.StreamResponse:
        if self.state.in_update:
            return _json({"success": False, "message": "a weight-update session is open already"}, 400)
        self.state.in_update, self.state.names = True, []
        return _json({"success": True, "message": "Success."})

    async def _end(self, request: web.Request) -> web.StreamResponse:
        if not self.state.in_update:
            return _json({"success": False, "message": "no weight-update session is open"}, 400)
        self.state.in_update = False
        return _json({"success": True, "message": "Success."})

    async def _from_disk(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        if not isinstance(body.get("model_path"), str):
            return _json({"error": {"message": "model_path: Field required"}}, 422)
        await self._turn()
        await asyncio.sleep(self.state.cfg.update_seconds)
        if self.state.lacks_weights():
            return self._died(request)
        if wrong := self.state.load_folder(body["model_path"]):
            return _json({"success": False, "message": wrong, "num_paused_requests": 0}, 400)
        if wrong := self._flushed(body):
            return _json({"success": False, "message": wrong, "num_paused_requests": 0}, 400)
        self.state.note_update(b"", body.get("weight_version"))
        return _json({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def _turn(self) -> None:
        """An update of a server that is not paused waits until every request has ended."""
        while not self.state.paused and self.state.running:
            await asyncio.sleep(0.001)

    def _flushed(self, body: dict[str, Any]) -> str:
        """Why the cache was not flushed, though an update that is done asks for it; empty where it was, or need not."""
        if not body.get("flush_cache", True):
            return ""
        if not self.state.is_idle():
            return "Weights were updated, but the cache was not flushed because requests are still running or queued."
        self.state.cache.clear()
        return ""

    async def _from_tensor(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        parts = body.get("serialized_named_tensors") or []
        has_session = self.state.in_update  # without one nobody looks at the parts
        if has_session and len(parts) < self.state.cfg.tensor_size:  # an IndexError in the scheduler of a later rank
            return self._died(request)
        return await self._bucket(request, body, "".join(parts).encode())

    async def _from_distributed(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        if body.get("group_name") not in self.state.groups:
            words = f"Failed to receive weights: Group {body.get('group_name')} does not exist."
            return _json({"success": False, "message": words}, 400)
        self.state.names += body["names"]  # unknown names are taken without a word, as by the real server
        return await self._bucket(request, body, orjson.dumps([body["names"], body["dtypes"], body["shapes"]]))

    async def _bucket(self, request: web.Request, body: dict[str, Any], content: bytes) -> web.StreamResponse:
        if not self.state.in_update:
            return _json({"success": False, "message": "call /begin_weight_update first"}, 400)
        await self._turn()
        async with self.state.door:
            await asyncio.sleep(self.state.cfg.update_seconds)
            if self.state.lacks_weights():
                return self._died(request)
            self.state.note_update(content, body.get("weight_version"))
        if wrong := self._flushed(body):
            return _json({"success": False, "message": wrong}, 400)
        return _json({"success": True, "message": "Success"})

    async def _init_group(self, request: web.Request) -> web.StreamResponse:
        self.state.groups.add((await _body(request))["group_name"])
        return _json({"success": True, "message": "Succeeded to initialize custom process group."})

    async def _destroy_group(self, request: web.Request) -> web.StreamResponse:
        name = (await _body(request)).get("group_name")
        known = name in self.state.groups
        self.state.groups.discard(str(name))
        words = "Succeeded to destroy custom process group." if known else "The group to be destroyed does not exist."
        return _json({"success": known, "message": words}, 200 if known else 400)

    async def _set_version(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        if body.get("abort_all_requests", True):
            self.state.abort("", everything=True)
        self.state.note_update(b"", body["new_version"])
        words = f"Weight version updated to {body['new_version']}"
        return _json({"success": True, "message": words, "new_version": body["new_version"]})

    async def _release(self, request: web.Request) -> web.StreamResponse:
        tags = set((await _body(request)).get("tags") or MEMORY_TAGS)
        is_again = self.state.cfg.memory_saver and bool(tags & self.state.released)
        if is_again or not self.state.is_idle():  # the real one's scheduler asserts both, and dies
            return self._died(request)
        self.state.released |= tags
        self.state.cache.clear()
        return web.Response(body=b"null", content_type="application/json")

    async def _take(self, request: web.Request) -> web.StreamResponse:
        tags = set((await _body(request)).get("tags") or MEMORY_TAGS)
        if tags - self.state.released:  # a KeyError in the real one's scheduler, which dies of it
            return self._died(request)
        self.state.released -= tags
        return web.Response(body=b"null", content_type="application/json")

    def _died(self, request: web.Request) -> web.StreamResponse:
        """A scheduler that raises takes its server with it."""
        self.crash(0.0)
        return cut(request)

    async def _checksum(self, request: web.Request) -> web.StreamResponse:
        if self.state.lacks_weights():
            return self._died(request)
        digest = self.state.digest.hexdigest()
        ranks = [{"checksums": {"all": digest}, "per_gpu_checksum": digest} for _ in range(self.state.cfg.tensor_size)]
        return _json({"success": True, "message": "Success", "ranks": ranks, "per_engine_checksum": digest})

    # what it says of itself

    async def _health(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(self.state.cfg.health_seconds)
        if self.state.lacks_memory() and not self.state.paused:  # it samples a token
            return self._died(request)
        return web.Response(status=503 if self.state.paused else 200)

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if self.state.paused else 200)

    async def _model_info(self, request: web.Request) -> web.StreamResponse:
        state = self.state
        info = {"model_path": state.model_path, "tokenizer_path": state.model_path, "is_generation": True}
        return _json({**info, "weight_version": state.label, "load_format": "auto", "model_type": "fake"})

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        cfg = self.state.cfg
        info = {
            "version": VERSION,
            "tp_size": cfg.tensor_size,
            "dp_size": cfg.data_size,
            "attn_dp_size": cfg.data_size,
            "model_path": "fake",
        }
        info |= {"enable_return_routed_experts": cfg.returns_routes, "weight_version": cfg.weight_version}
        info |= {"context_length": cfg.context_length, "enable_memory_saver": cfg.memory_saver}
        return _json({**info, "max_running_requests": cfg.max_running_requests, "internal_states": [], "fake": True})

    # steering

    async def _set_faults(self, request: web.Request) -> web.StreamResponse:
        try:
            self.state.rules = read_rules(await _body(request))
        except (ConfigError, TypeError) as error:
            return _json({"error": {"message": str(error)}}, 400)
        return _json({"faults": len(self.state.rules)})

    async def _restart(self, request: web.Request) -> web.StreamResponse:
        self.crash(float((await _body(request)).get("seconds", 0.0)))
        return _json({"num_restarts": self.state.num_restarts})

    async def _described(self, request: web.Request) -> web.StreamResponse:
        return _json(self.state.described())


async def _body(request: web.Request) -> Any:
    raw = await request.read()
    return orjson.loads(raw) if raw else {}


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _has_key(request: web.Request, key: str) -> bool:
    return request.headers.get("Authorization", "") == f"Bearer {key}"


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
