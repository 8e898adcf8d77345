"""Stop strings over servers: what is asked, what the fake server makes of it, and answers that ran over one."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest
from fake_servers import (
    EXPECTED,
    dispatching,
    prompt_of,
    read_by_hand,
    said_to,
    should_sample,
    until,
    wire_request,
)

from moerl.errors import RolloutError
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang.faults import ServerError
from moerl.rollout.sglang.wire import payload
from moerl.types import SamplingParams

PROMPT = prompt_of(5)
BUDGET = 12
IGNORED = {"kind": "ignore", "keys": ["stop"], "times": -1}


def tokens(seed: int = 1, count: int = BUDGET) -> list[int]:
    """What the fake server samples where nothing stops it."""
    return should_sample(PROMPT, count, seed=seed)[0].tolist()


def across(place: int) -> str:
    """A stop string that begins in the token at `place` and ends in the next; it is nowhere before."""
    one, other = tokens()[place : place + 2]
    stop = f"{one % 10} {other}"
    text = "".join(f"{token} " for token in tokens())
    assert text.index(stop) == len("".join(f"{token} " for token in tokens()[:place])) + len(str(one)) - 1
    return stop


def asked(server: FakeServer, *stops: str, budget: int = BUDGET, prompt: np.ndarray = PROMPT):
    async def main():
        async with dispatching([server]) as d:
            return await d.generate(prompt, SamplingParams(budget, seed=1, stop_strings=stops), "p#0")

    return asyncio.run(main())


def overrun(text: str, finish: dict | None = None, **params):
    """(an answer with that text, its request): three tokens, ended by their number or as said."""
    request = wire_request(**params)
    raw = said_to(replace(request, params=replace(request.params, stop_strings=())))
    raw["text"] = text
    raw["meta_info"]["finish_reason"] = finish or {"type": "length", "length": 3}
    return raw, request


# what is asked


@pytest.mark.parametrize(("stops", "longest"), [(("</call>",), 7), (("a", "é\n"), 3)])
def test_sglang_is_to_look_at_as_many_tokens_as_the_longest_has_bytes(stops, longest):
    sampling = payload(wire_request(stop_strings=stops))["sampling_params"]
    assert sampling["stop"] == list(stops)
    assert sampling["no_stop_trim"] is True
    pattern = sampling["stop_regex"]
    assert pattern.endswith(f"{{{longest}}}")
    assert not re.search(pattern, "".join(map(chr, range(0x3000))) + "</call> a é\n"), "it matches nothing"


def test_nothing_is_asked_where_there_is_no_stop_string():
    assert not {"stop", "stop_regex"} & set(payload(wire_request())["sampling_params"])


# whole requests


@pytest.mark.parametrize("place", [0, 4, BUDGET - 2], ids=["at once", "amid", "at the very end"])
def test_an_answer_ends_at_the_token_that_completes_a_stop_string(place):
    with FakeServer() as server:
        got = asked(server, "never", across(place))
    assert got.finish_reason == "stop"
    assert got.token_ids.tolist() == tokens()[: place + 2]
    assert got.routed_experts is not None
    assert len(got.routed_experts.open()) == len(PROMPT) + place + 2 - 1


def test_without_one_an_answer_has_its_length():
    with FakeServer() as server:
        got = asked(server, "never", "nor this")
    assert (got.finish_reason, got.token_ids.tolist()) == ("length", tokens())


@pytest.mark.parametrize("place", [0, 4, BUDGET - 2], ids=["at once", "amid", "at the very end"])
def test_a_server_that_runs_over_a_stop_string_is_found_out_by_its_first_answer(place):
    with (
        FakeServer(faults=[IGNORED]) as server,
        pytest.raises(RolloutError, match=r"request p#0: .*stop string '.*' stands in .* the server ignored stop"),
    ):
        asked(server, "never", across(place))


def test_one_that_ends_by_its_end_token_is_found_out_too():
    with (
        FakeServer(FakeEngineConfig(lengths="fixed:15"), faults=[IGNORED]) as server,
        pytest.raises(RolloutError, match="but it ended by stop: the server ignored stop"),
    ):
        asked(server, across(4))


def test_a_stop_string_in_the_prompt_alone_ends_nothing():
    """Nor one that begins there: the server looks at the answer's own tokens."""
    prompt = np.array([7, 77, 17], dtype=np.int32)
    first = should_sample(prompt, 1, seed=1)[0][0]
    for faults in ([], [IGNORED]):
        with FakeServer(faults=faults) as server:
            got = asked(server, "7 77 1", f"17 {first}", prompt=prompt)
        assert (got.finish_reason, len(got.token_ids)) == ("length", BUDGET)


STILL = FakeEngineConfig(token_seconds=1000.0)
"""Samples what `advance` lets it."""


def advance(server: FakeServer, count: int) -> None:
    """Let the one request that runs sample so many tokens, as if their time had passed."""

    def later(app) -> None:
        [one] = app.state.running.values()
        one.started -= count * STILL.token_seconds
        one.changed.set()

    server.call(later)


def in_parts(server: FakeServer, *cuts: int):
    """40 tokens, whose 30th and 31st are the stop string; cut off after so many of each request."""
    ids = tokens(count=40)

    async def runs():
        await until(lambda: server.call(lambda app: [one for one in app.state.running.values() if one.started]))

    async def main():
        async with dispatching([server]) as d:
            params = SamplingParams(40, seed=1, stop_strings=(f"{ids[29]} {ids[30]} ",))
            task = asyncio.create_task(d.generate(PROMPT, params, "p#0"))
            for count in cuts:
                await runs()
                advance(server, count)
                await d.pause("abort")
                await d.resume()
            await runs()
            advance(server, 40)
            got = await task
            assert d.counts.resumes == len(cuts)
            return got, ids[:31]

    return asyncio.run(main())


@pytest.mark.parametrize("cuts", [(13,), (29,), (30,), (12, 12, 12), (1, 30)])
def test_an_answer_in_parts_ends_where_a_whole_one_does(cuts):
    """Cut off before the tokens of the stop string and amid them; the last tokens before a cut are sampled again."""
    with FakeServer(STILL) as server:
        got, expected = in_parts(server, *cuts)
    assert (got.finish_reason, got.token_ids.tolist()) == ("stop", expected)


def test_the_part_that_runs_over_a_stop_string_is_found_out():
    with FakeServer(STILL, faults=[IGNORED]) as server, pytest.raises(RolloutError, match="the server ignored stop"):
        in_parts(server, 13)


# answers by hand


def test_an_answer_whose_own_text_holds_no_stop_string_is_taken():
    """As a part that goes on from others: the stop string would begin in their tokens."""
    raw, request = overrun("ll> and", stop_strings=("</call>",))
    assert read_by_hand(raw, request).finish_reason == "length"


def test_the_text_of_an_abort_is_not_looked_at():
    """The forward that ends it looks at no stop; its last tokens are dropped and sampled again."""
    raw, request = overrun("a</call>", {"type": "abort", "message": "Aborted"}, stop_strings=("</call>",))
    assert read_by_hand(raw, request).finish_reason == "abort"


@pytest.mark.parametrize(("text", "is_seen"), [("\n and so on", False), (" \n", True), ("\n\n", True), ("x on", True)])
def test_a_blank_at_the_very_start_may_be_one_that_the_server_does_not_see(text, is_seen):
    raw, request = overrun(text, stop_strings=("\n", "x"))
    if not is_seen:
        assert read_by_hand(raw, request).finish_reason == "length"
        return
    with pytest.raises(ServerError, match=r"stop string '(\\n|x)' stands in its text, but it ended by length"):
        read_by_hand(raw, request)


def test_without_text_nothing_is_believed():
    """Only where stop strings were asked for: the text is read for nothing else."""
    raw, request = overrun("", stop_strings=("</call>",))
    del raw["text"]
    with pytest.raises(ServerError, match=r"no text: whether the server ignored stop=\['</call>'\] cannot be seen"):
        read_by_hand(raw, request)
    raw, request = overrun("")
    del raw["text"]
    assert len(read_by_hand(raw, request).token_ids) == 3


@pytest.mark.parametrize(("stops", "words"), [((), r"\[\]"), (("</call>",), r"\['</call>'\]")])
def test_a_stop_that_nobody_asked_for_is_refused(stops, words):
    """SGLang ends an answer so where its logits are no numbers."""
    raw, request = overrun("a", {"type": "stop", "matched": "NaN happened"}, stop_strings=stops)
    with pytest.raises(ServerError, match=f"stopped at the text 'NaN happened', but was to stop at {words}"):
        read_by_hand(raw, request)


def test_the_stop_string_that_was_obeyed_is_one_of_those_asked_for():
    raw, request = overrun("a</call>", {"type": "stop", "matched": "</call>"}, stop_strings=("x", "</call>"))
    assert read_by_hand(raw, request, EXPECTED).finish_reason == "stop"
