"""Requests and answers of /generate: what is sent, and everything that an answer is held to."""

from __future__ import annotations

import base64
import copy
import json
from dataclasses import replace

import numpy as np
import pytest
from fake_servers import EXPECTED, LAYOUT, SERVER, prompt_of, read_by_hand, said_to, wire_request

from moerl.errors import RolloutError
from moerl.rollout.fake_engine.model import FakeModel
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang.faults import ServerError
from moerl.rollout.sglang.routes import encode_routes
from moerl.rollout.sglang.wire import Expected, WireRequest, payload, read_answer
from moerl.types import SamplingParams

# what is sent


def test_the_payload_says_everything_that_changes_sampling():
    params = SamplingParams(9, temperature=0.7, stop_token_ids=(1, 5), stop_strings=("end",), seed=2**62)
    request = WireRequest("r-1", prompt_of(3), params, 2)
    body = payload(request)
    assert body["input_ids"] == [2, 3, 4]
    assert "text" not in body
    sampling = body["sampling_params"]
    assert sampling["max_new_tokens"] == 9
    assert sampling["temperature"] == 0.7
    assert (sampling["top_p"], sampling["top_k"], sampling["min_p"]) == (1.0, -1, 0.0)
    assert sampling["sampling_seed"] == 2**62
    assert sampling["stop_token_ids"] == [1, 5]
    assert sampling["stop"] == ["end"]
    assert sampling["repetition_penalty"] == 1.0
    assert (body["return_logprob"], body["logprob_start_len"]) == (True, -1)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 2)
    assert "return_sampling_mask" not in body
    assert "routed_dp_rank" not in body
    json.dumps(body)


def test_greedy_requests_are_not_truncated():
    sampling = payload(wire_request(temperature=0.0, top_p=0.5, top_k=7))["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.0, 1.0, -1)


@pytest.mark.parametrize(("top_p", "top_k", "sent"), [(0.9, 0, 4096), (1.0, 50, 50), (0.9, 50, 50)])
def test_truncation_goes_through_the_sampling_mask(top_p, top_k, sent):
    body = payload(wire_request(top_p=top_p, top_k=top_k))
    assert body["return_sampling_mask"] is True
    assert body["sampling_params"]["top_k"] == sent


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"top_k": 5000}, "top_k is 5000, but SGLang tells the tokens in the running for at most 4096"),
        ({"top_p": 0.9, "top_logprobs": 4}, "likeliest tokens are those before truncation"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"budget": 0}, "max_new_tokens is 0"),
        ({"prompt": 0}, "the prompt has no tokens"),
    ],
)
def test_what_cannot_be_asked_is_refused(params, words):
    with pytest.raises(RolloutError, match=words):
        payload(wire_request(**params))


# what is believed


@pytest.mark.parametrize("start", [0, 1, 4])
def test_an_answer_is_read_to_the_last_number(start):
    request = wire_request(prompt=4, budget=3, routes_from=start)
    raw = said_to(request)
    got = read_by_hand(raw, request)
    assert got.token_ids.dtype == np.int32
    assert got.token_ids.tolist() == raw["output_ids"]
    assert got.logprobs.dtype == np.float32
    np.testing.assert_allclose(got.logprobs, [one[0] for one in raw["meta_info"]["output_token_logprobs"]])
    assert got.finish_reason == "length"
    assert got.spans == ((0, 3, 0),)
    assert got.routes is not None
    assert got.routes.shape == (4 + 3 - 1 - start, 3, 2)
    assert got.routes.dtype == np.uint8
    text = np.concatenate([request.token_ids, got.token_ids])
    np.testing.assert_array_equal(got.routes, FakeModel(FakeEngineConfig()).routes("default", text, 0)[start:-1])


def test_one_token_has_the_rows_of_the_prompt():
    request = wire_request(prompt=5, budget=1)
    routes = read_by_hand(said_to(request), request).routes
    assert routes is not None
    assert len(routes) == 5


@pytest.mark.parametrize("rows", [5, 7])
def test_another_number_of_rows_than_prompt_and_response_less_one_raises(rows):
    """BUGS 25: a prompt of 4 and a response of 3 make 6 rows."""
    request = wire_request(prompt=4, budget=3)
    raw = said_to(request)
    raw["meta_info"]["routed_experts"] = encode_routes(np.arange(rows * 6).reshape(rows, 3, 2) % 8)
    with pytest.raises(ServerError, match=rf"holds {rows} rows .*but 6 rows belong to these tokens"):
        read_by_hand(raw, request)


def test_a_server_that_ignores_the_start_is_told_so():
    request = wire_request(prompt=4, budget=3, routes_from=4)
    raw = said_to(wire_request(prompt=4, budget=3, routes_from=0))
    with pytest.raises(ServerError, match="routed_experts_start_len was ignored"):
        read_by_hand(raw, request)


def spoil(path: str, value):
    """A change of the answer: `meta.key`, or a top-level key; `...` removes it."""

    def change(raw):
        place = raw["meta_info"] if path.startswith("meta.") else raw
        key = path.removeprefix("meta.")
        if value is ...:
            del place[key]
        else:
            place[key] = value(place[key]) if callable(value) else value

    return change


SPOILED = {
    "no logprobs": (spoil("meta.output_token_logprobs", ...), "ignored return_logprob"),
    "fewer logprobs": (spoil("meta.output_token_logprobs", lambda v: v[:-1]), "2 logprobs for 3 tokens"),
    "null logprob": (spoil("meta.output_token_logprobs", lambda v: [[None, *v[0][1:]], *v[1:]]), "logprob 0 is None"),
    "NaN logprob": (
        spoil("meta.output_token_logprobs", lambda v: [*v[:-1], [float("nan"), *v[-1][1:]]]),
        "logprob 2 is nan",
    ),
    "positive logprob": (spoil("meta.output_token_logprobs", lambda v: [[0.5, *v[0][1:]], *v[1:]]), "logprob 0 is 0.5"),
    "infinite logprob": (
        spoil("meta.output_token_logprobs", lambda v: [[-float("inf"), *v[0][1:]], *v[1:]]),
        "logprob 0 is -inf",
    ),
    "other ids in logprobs": (
        spoil("meta.output_token_logprobs", lambda v: [[v[0][0], v[0][1] ^ 1, None], *v[1:]]),
        "token 0 is .* ids were changed on the way",
    ),
    "other ids": (spoil("output_ids", lambda v: [*v[:-1], v[-1] ^ 1]), "token 2 is"),
    "ids beyond the vocabulary": (spoil("output_ids", lambda v: [*v[:-1], 320]), "beyond the vocabulary"),
    "text for ids": (spoil("output_ids", "abc"), "no list of token ids"),
    "count": (spoil("meta.completion_tokens", 2), "completion_tokens is 2, but output_ids holds 3"),
    "prompt count": (spoil("meta.prompt_tokens", 5), "prompt_tokens is 5, but 4 were sent"),
    "another rid": (spoil("meta.id", "b-2"), "the answer is that of request b-2"),
    "no routes": (spoil("meta.routed_experts", ...), "--enable-return-routed-experts"),
    "routes no base64": (spoil("meta.routed_experts", "###"), "no base64"),
    "no finish reason": (spoil("meta.finish_reason", None), "finish_reason is None"),
    "unknown finish": (spoil("meta.finish_reason", {"type": "tool"}), "finish_reason is"),
    "another stop": (
        spoil("meta.finish_reason", {"type": "stop", "matched": 319}),
        r"it stopped at token 319, but the last of output_ids is \d+;",
    ),
    "no tokens": (spoil("output_ids", []), "no tokens, although it ended by length"),
    "spans with a gap": (
        spoil("meta.weight_versions", [{"version": "0", "start": 1, "end": 3}]),
        "must follow one another from token 0",
    ),
    "spans too short": (
        spoil("meta.weight_versions", [{"version": "0", "start": 0, "end": 2}]),
        "does not cover 3 tokens",
    ),
    "no meta": (spoil("meta_info", ...), "no meta_info"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_does_not_agree_is_an_error_that_names_request_and_server(name):
    request = wire_request()
    raw = said_to(request)
    change, words = SPOILED[name]
    change(raw)
    with pytest.raises(ServerError, match=words) as caught:
        read_by_hand(raw, request)
    assert caught.value.kind == "bad_answer"
    assert not caught.value.is_retried
    if name != "no meta":
        assert "request a-1" in str(caught.value)
    assert str(caught.value).startswith(SERVER)


def test_a_request_ran_on_the_rank_that_it_was_sent_to():
    """Pitfall 22: SGLang names the rank; a router may have chosen another one."""
    free = wire_request()
    asked, raw = replace(free, data_rank=2), said_to(free)
    for rank in (2, None):
        raw["meta_info"]["dp_rank"] = rank
        assert len(read_by_hand(raw, asked).token_ids) == 3
    for rank in (0, 3):
        raw["meta_info"]["dp_rank"] = rank
        with pytest.raises(ServerError, match=rf"it ran on data-parallel rank {rank}, but was sent to 2 \(routed_dp"):
            read_by_hand(raw, asked)
        assert len(read_by_hand(raw, free).token_ids) == 3


def test_too_many_tokens_show_an_ignored_budget():
    raw = said_to(wire_request(budget=3))
    with pytest.raises(ServerError, match="max_new_tokens is 2: the server ignored it"):
        read_by_hand(raw, wire_request(budget=2))


def test_a_stop_token_in_the_middle_shows_ignored_stop_tokens():
    raw = said_to(wire_request())
    request = wire_request(stop_token_ids=(raw["output_ids"][1],))
    with pytest.raises(ServerError, match="the server ignored stop_token_ids"):
        read_by_hand(raw, request)


# versions, truncation


def test_without_spans_the_one_version_counts():
    request = wire_request()
    raw = said_to(request)
    del raw["meta_info"]["weight_versions"]
    assert read_by_hand(raw, request).spans == ((0, 3, 0),)
    del raw["meta_info"]["weight_version"]
    with pytest.raises(ServerError, match="which policy sampled these tokens is not known"):
        read_by_hand(raw, request)


def test_a_label_that_nobody_published_is_an_error():
    request = wire_request()
    with pytest.raises(ServerError, match="weight version 'default' is none that was published"):
        read_by_hand(said_to(request), request, Expected(LAYOUT, 320))


def test_truncated_sampling_takes_the_behaviour_logprobs_and_the_support():
    request = wire_request(top_p=0.9)
    raw = said_to(request)
    got = read_by_hand(raw, request)
    np.testing.assert_allclose(got.logprobs, raw["meta_info"]["output_token_sampling_logprobs"], rtol=1e-6)
    assert got.support is not None
    assert got.support.offsets.tolist() == [0, 2, 4, 6]
    for place, token in enumerate(got.token_ids):
        assert token in got.support.ids[2 * place : 2 * place + 2]


@pytest.mark.parametrize("missing", ["output_token_sampling_logprobs", "output_token_sampling_mask"])
def test_a_server_without_sampling_masks_is_found_out(missing):
    request = wire_request(top_k=5)
    raw = said_to(request)
    del raw["meta_info"][missing]
    with pytest.raises(ServerError, match=missing):
        read_by_hand(raw, request)


def test_the_likeliest_tokens_are_read_where_they_were_asked_for():
    request = wire_request(top_logprobs=4)
    raw = said_to(request)
    top = read_by_hand(raw, request).top_logprobs
    assert top is not None
    assert top.ids.shape == top.logprobs.shape == (3, 4)
    assert top.ids[:, 0].tolist() == raw["output_ids"]
    del raw["meta_info"]["output_top_logprobs"]
    with pytest.raises(ServerError, match="ignored top_logprobs_num"):
        read_by_hand(raw, request)


@pytest.mark.parametrize(
    ("params", "key", "value", "words"),
    [
        ({"top_logprobs": 2}, "output_top_logprobs", 7, "output_top_logprobs of token 1 is 7, but must be a list"),
        ({"top_logprobs": 2}, "output_top_logprobs", [3], "top logprob 0 of token 1 is 3, but must be"),
        ({"top_logprobs": 2}, "output_top_logprobs", [[-1.0]], r"is \[-1.0\], but must be \[logprob, token id"),
        ({"top_logprobs": 2}, "output_top_logprobs", [["x", 3]], "top logprob 0 of token 1 is"),
        ({"top_logprobs": 2}, "output_top_logprobs", [[-1.0, 1 << 40]], "top logprob 0 of token 1 is"),
        ({"top_p": 0.9}, "output_token_sampling_mask", ["x"], "mask of token 1 holds 'x', which is no token id"),
        ({"top_p": 0.9}, "output_token_sampling_mask", [[1]], r"mask of token 1 holds \[1\], which is no"),
        ({"top_p": 0.9}, "output_token_sampling_mask", [1 << 40], "which is no token id"),
    ],
)
def test_a_malformed_step_names_the_request_and_the_server(params, key, value, words):
    request = wire_request(**params)
    raw = said_to(request)
    raw["meta_info"][key][1] = value
    with pytest.raises(ServerError, match=words) as caught:
        read_answer(raw, request, EXPECTED, server="http://one")
    assert caught.value.kind == "bad_answer"
    assert request.rid in str(caught.value)
    assert "http://one" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_retractions", "many", "num_retractions is 'many', but must be a number of 0 or more"),
        ("cached_tokens", [1], r"cached_tokens is \[1\], but must be"),
        ("weight_versions", [{"start": 0, "end": 3, "version": "9" * 5000}], "is none that was published from here"),
    ],
)
def test_counts_and_labels_that_are_none_are_a_bad_answer(key, value, words):
    request = wire_request()
    raw = said_to(request)
    raw["meta_info"][key] = value
    with pytest.raises(ServerError, match=words):
        read_by_hand(raw, request)


def test_reading_changes_nothing():
    request = wire_request(top_p=0.5)
    raw = said_to(request)
    before = copy.deepcopy(raw)
    read_by_hand(raw, request)
    assert raw == before
    assert base64.b64decode(raw["meta_info"]["routed_experts"])
