"""Remote rewards and model judges against a real server on loopback, with everything that can go wrong."""

from __future__ import annotations

import asyncio
import logging
import threading

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: run tools/setup.py again")
pytest.importorskip("tenacity", reason="tenacity is not installed: run tools/setup.py again")

from aiohttp import web

from moerl.errors import ConfigError
from moerl.metrics import to_floats
from moerl.rewards.base import UnscoredError
from moerl.rewards.model_judge import ModelJudge, ModelJudgeConfig
from moerl.rewards.pool import SandboxPool
from moerl.rewards.remote import Remote, RemoteConfig
from moerl.types import Prompt

PROMPT = Prompt("d/1", np.array([1], np.int32), "42", "d", metadata={"text": "6*7?", "level": 3})


class Server:
    """Answers by `replies`, one after the other, the last one for ever: a JSON value, a response, or a coroutine."""

    def __init__(self) -> None:
        self.replies: list = [{"reward": 1.0}]
        self.bodies: list = []
        self.headers: list = []
        self.running = self.most = 0
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/score", self._answer)
        self._runner = web.AppRunner(app)
        self._loop.run_until_complete(self._runner.setup())
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/score"
        self._ready.set()
        self._loop.run_forever()

    async def _answer(self, request):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            self.bodies.append(await request.json())
            self.headers.append(dict(request.headers))
            reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
            if callable(reply):
                reply = await reply(request)
            return reply if isinstance(reply, web.StreamResponse) else web.json_response(reply)
        finally:
            self.running -= 1

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def pool():
    pool = SandboxPool(num_workers=1, timeout_seconds=2.0, memory_bytes=1_000_000_000)
    yield pool
    pool.close()


@pytest.fixture
def made(pool):
    """Builds rewards and closes them."""
    built = []

    def make(kind, config):
        built.append(kind(config, pool))
        return built[-1]

    yield make
    for one in built:
        one.close()
        one.close()


def status(code, text="secret detail"):
    async def reply(request):
        return web.Response(status=code, text=text)

    return reply


async def late(request):
    await asyncio.sleep(0.3)
    return {"reward": 1.0}


async def cut(request):
    request.transport.abort()
    return web.Response()


async def redirect(request):
    raise web.HTTPTemporaryRedirect(location=str(request.url))


async def long(request):
    return web.Response(text='{"reward": 1.0, "x": "' + "y" * 5000 + '"}', content_type="application/json")


async def nonsense(request):
    return web.Response(text="{reward", content_type="application/json")


async def nan(request):
    return web.Response(text='{"reward": NaN}', content_type="application/json")


def remote(server, made, **changes):
    return made(Remote, RemoteConfig(**{"url": server.url, "timeout_seconds": 20.0, **changes}))


def ask(reward, text="41"):
    return asyncio.run(reward.score(PROMPT, text))


def test_what_is_sent_and_what_comes_back(server, made):
    server.replies = [{"reward": 0.25, "why": "close"}]
    assert ask(remote(server, made, send=["level"])) == 0.25
    assert server.bodies == [
        {"prompt_id": "d/1", "dataset": "d", "prompt": "6*7?", "text": "41", "answer": "42", "metadata": {"level": 3}}
    ]


@pytest.mark.parametrize("fault", [status(503), status(429), cut])
def test_what_may_get_better_is_asked_again(server, made, fault):
    server.replies = [fault, fault, {"reward": 1}]
    reward = remote(server, made)
    assert ask(reward) == 1.0
    assert to_floats(reward.take_metrics()) == {"retries": 2.0}
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("fault", "message", "requests"),
    [
        (status(503), "exception: HTTP status 503$", 3),
        (status(400), "exception: HTTP status 400$", 1),
        (status(401), "exception: HTTP status 401$", 1),
        (redirect, "exception: HTTP status 307$", 1),
        (nonsense, "exception: the answer is not JSON$", 1),
        ([1.0], "exception: the answer is not a JSON object$", 1),
        ({}, "no `reward` that is a finite number", 1),
        ({"reward": "1"}, "no `reward` that is a finite number", 1),
        ({"reward": True}, "no `reward` that is a finite number", 1),
        ({"reward": None}, "no `reward` that is a finite number", 1),
        (nan, "no `reward` that is a finite number", 1),
        ({"reward": 9.0}, "the reward 9 is outside of -1e\\+06 to 2", 1),
        (long, "the answer is longer than 4096 bytes", 1),
    ],
)
def test_a_failure_is_no_verdict_and_never_a_number(server, made, fault, message, requests):
    server.replies = [fault]
    with pytest.raises(UnscoredError, match=message) as caught:
        ask(remote(server, made, maximum=2.0, max_response_bytes=4096))
    assert "secret" not in str(caught.value)
    assert len(server.bodies) == requests


def test_a_late_answer_is_a_timeout(server, made):
    server.replies = [late]
    with pytest.raises(UnscoredError, match=r"timeout: no answer within 0\.05 s") as caught:
        ask(remote(server, made, timeout_seconds=0.05))
    assert caught.value.kind == "timeout"


def test_nobody_there_is_no_verdict(made):
    reward = made(Remote, RemoteConfig(url="http://127.0.0.1:9/score", max_tries=2))
    with pytest.raises(UnscoredError, match="exception: Client"):
        ask(reward)


def test_no_more_requests_at_once_than_told_and_waiting_is_not_late(server, made):
    server.replies = [late]
    reward = remote(server, made, max_concurrency=3, timeout_seconds=2.0)

    async def many():
        return await asyncio.gather(*(reward.score(PROMPT, str(i)) for i in range(24)))

    assert asyncio.run(many()) == [1.0] * 24
    assert server.most == 3


def test_secrets_reach_the_service_and_nothing_else(server, made, monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SCORE_KEY", "Bearer hunter2")
    (tmp_path / "key").write_text("swordfish\n")
    reward = remote(
        server,
        made,
        headers_from_env={"Authorization": "SCORE_KEY"},
        headers_from_file={"X-Key": str(tmp_path / "key")},
    )
    ask(reward)
    assert server.headers[0]["Authorization"] == "Bearer hunter2"
    assert server.headers[0]["X-Key"] == "swordfish"
    server.replies = [status(500)]
    with pytest.raises(UnscoredError) as caught:
        ask(reward)
    for secret in ("hunter2", "swordfish"):
        assert secret not in caplog.text + str(caught.value) + repr(reward)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"url": "ftp://x"}, "url='ftp://x' must be an http:// or https:// address"),
        ({"url": ""}, "url='' must be"),
        ({"url": "http://me:hunter2@host/x"}, "url must hold no user or password"),
        ({"max_tries": 0}, "max_tries=0 must be 1 or more"),
        ({"max_concurrency": 0}, "max_concurrency=0 must be 1 or more"),
        ({"timeout_seconds": 0.0}, "timeout_seconds=0.0 must be above 0"),
        ({"max_response_bytes": 1}, "max_response_bytes=1 must be 2 or more"),
        ({"minimum": 1.0, "maximum": 1.0}, "minimum=1.0 must be below maximum=1.0"),
        ({"headers_from_env": {"A": "NOT_THERE_AT_ALL"}}, "NOT_THERE_AT_ALL, which is not set"),
        ({"headers_from_file": {"A": "/no/such/file"}}, "headers_from_file.A=/no/such/file cannot be read"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Remote(RemoteConfig(**{"url": "http://host/score", **wrong}), None)
    assert "hunter2" not in str(caught.value)


def test_columns_to_send_are_checked_at_the_start(server, made):
    assert remote(server, made, send=["level", "tag"]).check([PROMPT]) == [
        "has no column tag, which the reward remote is told to send"
    ]


TEMPLATE = "Q: {question}\nGold: {gold}\nA: {answer}\nEnd with Score: 0 to 10"


def test_another_reader_counts_apart_over_the_same_connections(server, made, tmp_path):
    for reward, answer in ((remote(server, made), {"reward": 1}), (judge(server, made, tmp_path), *says("Score: 10"))):
        server.replies = [status(503), answer, status(503), status(503), answer]
        other = reward.apart()
        assert (ask(reward, "a"), ask(other, "b")) == (1.0, 1.0)
        assert to_floats(other.take_metrics())["retries"] == 2.0
        assert to_floats(reward.take_metrics())["retries"] == 1.0


def says(*texts):
    return [{"choices": [{"message": {"content": text}}]} for text in texts]


def judge(server, made, tmp_path, text=TEMPLATE, **changes):
    path = tmp_path / "judge.txt"
    path.write_text(text)
    given = {"url": server.url, "template": str(path), "model": "big", "maximum": 10.0, "cache_entries": 0, **changes}
    return made(ModelJudge, ModelJudgeConfig(**given))


def test_the_judge_is_asked_with_the_template_and_read_by_the_pattern(server, made, tmp_path):
    server.replies = says("Score: 2? No. I think\nscore: 7.5")
    assert ask(judge(server, made, tmp_path), "it says {gold} {question}") == 0.75
    (body,) = server.bodies
    assert body["model"] == "big"
    assert body["messages"][0]["content"] == "Q: 6*7?\nGold: 42\nA: it says {gold} {question}\nEnd with Score: 0 to 10"


def test_sglang_and_words(server, made, tmp_path):
    server.replies = [{"text": "Thus: YES."}]
    words = {"yes": 1.0, "no": 0.0}
    reward = judge(server, made, tmp_path, api="sglang", verdict=r"(?i)\b(yes|no)\b", words=words, maximum=1.0)
    assert ask(reward) == 1.0
    assert set(server.bodies[0]) == {"text", "sampling_params"}


def test_votes_are_averaged_and_unreadable_ones_counted(server, made, tmp_path):
    server.replies = says("Score: 10", "Score: 5", "hm", "Score: 0")
    reward = judge(server, made, tmp_path, votes=4, temperature=0.7, max_unreadable=1)
    assert ask(reward) == pytest.approx(0.5)
    assert to_floats(reward.take_metrics()) == {"unreadable": 1.0, "cached": 0.0, "retries": 0.0}
    assert sorted(body["seed"] for body in server.bodies) == [0, 1, 2, 3]
    server.replies = says("hm")
    with pytest.raises(UnscoredError, match="4 of 4 votes have no verdict"):
        ask(reward)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (says("no idea")[0], "1 of 1 votes"),
        (says("Score: 11")[0], "1 of 1 votes"),
        (says("Score: 1.2.3")[0], "1 of 1 votes"),
        ({"choices": []}, "no text at"),
        ({"choices": [{"message": {"content": None}}]}, "no text at"),
        (status(500), "HTTP status 500"),
    ],
)
def test_a_judge_without_a_verdict_is_no_zero(server, made, tmp_path, reply, message):
    server.replies = [reply]
    with pytest.raises(UnscoredError, match=message):
        ask(judge(server, made, tmp_path))


@pytest.mark.parametrize(
    ("text", "value"),
    [("Good. Score: 8.", 0.8), ("Score: 0.5.", 0.05), ("score: .5", 0.05), ("Score: 7.25, so", 0.725)],
)
def test_a_number_may_end_a_sentence(server, made, tmp_path, text, value):
    server.replies = says(text)
    assert ask(judge(server, made, tmp_path)) == pytest.approx(value)


@pytest.mark.parametrize("api", ["chat", "sglang"])
def test_what_stands_in_an_answer_that_was_cut_off_is_no_verdict(server, made, tmp_path, api):
    """A thought may hold a score that is not the last word, and a number may lack its last digit."""
    text = "Score: 2 would be too harsh, since"
    cut = {"choices": [{"message": {"content": text}, "finish_reason": "length"}]}
    whole = {"choices": [{"message": {"content": "Score: 9"}, "finish_reason": "stop"}]}
    if api == "sglang":
        cut = {"text": text, "meta_info": {"finish_reason": {"type": "length", "length": 9}}}
        whole = {"text": "Score: 9", "meta_info": {"finish_reason": {"type": "stop", "matched": 2}}}
    server.replies = [cut]
    reward = judge(server, made, tmp_path, api=api)
    with pytest.raises(UnscoredError, match="1 of 1 votes have no verdict"):
        ask(reward)
    assert to_floats(reward.take_metrics())["unreadable"] == 1.0
    server.replies = [whole]
    assert ask(reward) == 0.9


def test_a_text_on_which_the_pattern_hangs_is_cut_off_and_no_verdict(server, made, tmp_path):
    """Patterns run in the sandboxed pool: a judge may quote what a hostile answer told it to."""
    server.replies = says("a" * 64 + "!")
    with pytest.raises(UnscoredError, match="timeout"):
        ask(judge(server, made, tmp_path, verdict=r"((a|aa)+)$"))


def test_equal_questions_are_asked_once(server, made, tmp_path):
    server.replies = says("Score: 10")
    reward = judge(server, made, tmp_path, cache_entries=1)
    assert [ask(reward, text) for text in ("a", "a", "b", "a")] == [1.0] * 4
    assert len(server.bodies) == 3
    assert to_floats(reward.take_metrics())["cached"] == 1.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"api": "rest"}, "api is 'rest'; allowed: chat, sglang"),
        ({"verdict": "("}, "is no regular expression"),
        ({"verdict": "yes"}, "has no group"),
        ({"minimum": 10.0}, "must be below maximum"),
        ({"votes": 0}, "votes=0 must be 1 or more"),
        ({"votes": 2, "max_unreadable": 2, "temperature": 1.0}, "max_unreadable=2 below it"),
        ({"votes": 2}, "are all the same; set it above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be 1 or more"),
        ({"template": "/no/such/file"}, "template='/no/such/file' must be a text file"),
    ],
)
def test_wrong_judges_are_refused(server, made, tmp_path, wrong, message):
    with pytest.raises(ConfigError, match=message):
        judge(server, made, tmp_path, **wrong)


def test_a_template_must_show_the_answer_and_a_gold_answer_be_there(server, made, tmp_path):
    with pytest.raises(ConfigError, match=r"must hold \{answer\}"):
        judge(server, made, tmp_path, text="nothing")
    bare = Prompt("d/2", np.array([1], np.int32), None, "d")
    assert judge(server, made, tmp_path).check([PROMPT, bare]) == [
        None,
        "has no gold answer, and the judge's template shows it",
    ]
