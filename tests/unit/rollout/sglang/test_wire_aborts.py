"""Answers of requests that were aborted, and whose tokens several policies sampled: what of them is kept."""

from __future__ import annotations

import numpy as np
import pytest
from fake_servers import read_by_hand, said_to, wire_request

from moerl.rollout.sglang.faults import ServerError
from moerl.rollout.sglang.routes import encode_routes
from moerl.rollout.sglang.wire import WireRequest


def aborted(request: WireRequest) -> dict:
    raw = said_to(request)
    raw["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
    return raw


def test_the_partial_answer_of_an_abort_is_kept_with_its_routes():
    request = wire_request()
    got = read_by_hand(aborted(request), request)
    assert (got.finish_reason, len(got.token_ids), got.num_dropped) == ("abort", 3, 0)
    assert got.routes is not None
    assert len(got.routes) == 6


@pytest.mark.parametrize("missing", ["routed_experts", "output_token_logprobs"])
def test_tokens_of_an_abort_without_logprobs_or_routes_are_dropped_and_counted(missing):
    request = wire_request()
    raw = aborted(request)
    del raw["meta_info"][missing]
    got = read_by_hand(raw, request)
    assert (len(got.token_ids), len(got.logprobs), got.routes, got.spans) == (0, 0, None, ())
    assert got.num_dropped == 3


@pytest.mark.parametrize("left", [0, 1, 2])
@pytest.mark.parametrize("truncated", [{}, {"top_p": 0.9}])
def test_tokens_of_an_abort_with_fewer_logprobs_are_dropped_too(left, truncated):
    """Pitfall 9: which of the tokens they belong to is not known."""
    request = wire_request(**truncated)
    raw = aborted(request)
    raw["meta_info"]["output_token_logprobs"] = raw["meta_info"]["output_token_logprobs"][:left]
    got = read_by_hand(raw, request)
    assert (got.finish_reason, len(got.token_ids), len(got.logprobs), got.routes) == ("abort", 0, 0, None)
    assert (got.spans, got.num_dropped) == ((), 3)


def test_more_logprobs_than_tokens_of_an_abort_are_an_error():
    request = wire_request()
    raw = aborted(request)
    raw["meta_info"]["output_token_logprobs"] *= 2
    with pytest.raises(ServerError, match="6 logprobs for 3 tokens"):
        read_by_hand(raw, request)


def test_wrong_routes_of_an_abort_are_an_error_all_the_same():
    request = wire_request()
    raw = aborted(request)
    raw["meta_info"]["routed_experts"] = encode_routes(np.zeros((5, 3, 2)))
    with pytest.raises(ServerError, match="but 6 rows belong"):
        read_by_hand(raw, request)


def test_an_abort_in_the_queue_has_no_tokens_and_says_little():
    request = wire_request()
    meta = {"id": "a-1", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "0"}
    got = read_by_hand({"text": "", "output_ids": [], "meta_info": meta | {"completion_tokens": 0}}, request)
    assert (got.finish_reason, len(got.token_ids)) == ("abort", 0)


def test_an_abort_in_the_queue_has_no_masks_either():
    """SGLang sends an empty list of logprobs then and no sampling mask; or tokens with their logprobs alone."""
    request = wire_request(top_p=0.9)
    meta = {"id": "a-1", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "0"}
    meta |= {"completion_tokens": 0, "output_token_logprobs": []}
    assert len(read_by_hand({"text": "", "output_ids": [], "meta_info": meta}, request).token_ids) == 0
    raw = aborted(request)
    for name in ("output_token_sampling_logprobs", "output_token_sampling_mask"):
        del raw["meta_info"][name]
    got = read_by_hand(raw, request)
    assert (got.finish_reason, len(got.token_ids), got.num_dropped) == ("abort", 0, 3)


def test_an_end_token_drawn_in_the_step_that_aborts_is_the_end():
    """The last forward of an aborted request looks at no stop (schedule_batch.py, `update_finish_state`)."""
    free = wire_request(budget=5)
    last = said_to(free)["output_ids"][-1]
    request = wire_request(budget=5, stop_token_ids=(last,))
    raw = said_to(free)
    raw["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
    got = read_by_hand(raw, request)
    assert (got.finish_reason, len(got.token_ids), got.num_dropped) == ("stop", 5, 0)
    raw["meta_info"]["finish_reason"] = {"type": "length", "length": 5}
    assert read_by_hand(raw, request).finish_reason == "length"


@pytest.mark.parametrize(("stop", "kept"), [(("ab",), 3), (("a", "long"), 1), (("é",), 3), (("longer than it",), 0)])
@pytest.mark.parametrize("truncated", [{}, {"top_p": 0.9}])
def test_of_an_abort_the_tokens_in_which_a_stop_string_may_stand_are_sampled_anew(stop, kept, truncated):
    """The request that goes on looks for it in its own tokens alone."""
    request = wire_request(prompt=4, budget=5, stop_strings=stop, **truncated)
    whole, got = read_by_hand(said_to(request), request), read_by_hand(aborted(request), request)
    assert (got.finish_reason, len(got.token_ids), got.num_dropped) == ("abort", kept, 5 - kept)
    assert got.token_ids.tolist() == whole.token_ids[:kept].tolist()
    assert got.logprobs.tolist() == whole.logprobs[:kept].tolist()
    assert got.spans == (((0, kept, 0),) if kept else ())
    assert got.routes is not None
    assert got.routes.tolist() == whole.routes[: 4 + kept - 1 - request.routes_from].tolist()
    if truncated:
        assert got.support.offsets.tolist() == whole.support.offsets[: kept + 1].tolist()
        assert len(got.support.ids) == got.support.offsets[-1]


@pytest.mark.parametrize(("kept", "true_from"), [(4, 5), (1, 4)])
def test_rows_that_newer_weights_made_again_stay_so_where_tokens_are_dropped(kept, true_from):
    """Of one token none is left that the new policy drew: all four rows are of its making, and not the sampler's."""
    request = wire_request(prompt=4, budget=5, stop_strings=("x" * (5 - kept),))
    raw = aborted(request)
    raw["meta_info"] |= {
        "num_retractions": 1,
        "weight_version": "1",
        "weight_versions": [{"version": "0", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 5}],
    }
    got = read_by_hand(raw, request)
    assert (len(got.token_ids), got.true_from) == (kept, true_from)
    assert got.spans == (((0, 2, 0), (2, 4, 1)) if kept == 4 else ((0, 1, 0),))


@pytest.mark.parametrize(("status", "kind"), [(400, "refused"), (429, "busy"), (500, "broken"), (503, "busy")])
def test_an_abort_by_the_servers_own_fault_is_that_fault(status, kind):
    request = wire_request()
    raw = aborted(request)
    raw["meta_info"]["finish_reason"] |= {"status_code": status, "message": "out of memory"}
    with pytest.raises(ServerError, match=f"ended with status {status}: out of memory") as caught:
        read_by_hand(raw, request)
    assert caught.value.kind == kind


def test_spans_say_which_policy_sampled_which_token():
    request = wire_request(budget=5)
    raw = said_to(request)
    raw["meta_info"] |= {
        "weight_version": "4",
        "weight_versions": [{"version": "default", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}],
    }
    got = read_by_hand(raw, request)
    assert got.spans == ((0, 2, 0), (2, 5, 4))
    assert got.true_from == 0


def test_after_a_retraction_over_an_update_old_rows_are_not_the_sampling_policys():
    """Pitfall 21: rows of the earlier span were computed again by the new weights."""
    request = wire_request(prompt=4, budget=5)
    raw = said_to(request)
    raw["meta_info"] |= {
        "num_retractions": 1,
        "weight_version": "1",
        "weight_versions": [{"version": "0", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 5}],
    }
    got = read_by_hand(raw, request)
    assert got.true_from == 4 + 2 - 1  # the row that predicts the first token of the new policy
    raw["meta_info"]["weight_versions"] = [{"version": "1", "start": 0, "end": 5}]
    assert read_by_hand(raw, request).true_from == 0  # memory alone: the same weights made them again
