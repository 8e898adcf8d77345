"""Routes on SGLang's wire: base64 of little-endian int32 [rows, layers, experts per token], in C order.

A request of p prompt tokens and s sampled ones, asked for rows from `start`, has exactly `p + s - 1 - start` of them:
row i is the forward of token i, and the last token never ran. Ids are logical experts in the router's order; layers are
all of the model's, dense ones included, whose slots mean nothing.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence

import numpy as np

from moerl.errors import RolloutError
from moerl.rollout.engine import RouteLayout

try:
    from pybase64 import b64decode
except ImportError:  # an environment from before it was pinned: the same, 45 times slower
    b64decode = None


def encode_routes(rows: np.ndarray) -> str:
    """[rows, layers, k] -> the text on the wire."""
    return binascii.b2a_base64(np.ascontiguousarray(rows, dtype="<i4").tobytes(), newline=False).decode("ascii")


def decode_routes(text: object, layout: RouteLayout, *, rows: int, start: int = 0) -> np.ndarray:
    """[rows, l, k] of the MoE layers, uint8 (int16 above 256 experts).

    Args:
        text: what stands under `routed_experts`.
        layout: of the model.
        rows: exactly how many there must be.
        start: first row that was asked for; only to say so where a server ignored it.

    Raises:
        RolloutError: no text, no base64, another number of rows, an id that is no expert, or a row whose first two
            experts are one (as in rows filled with zeros).
    """
    if not isinstance(text, str) or not text.isascii():
        raise RolloutError(f"routed_experts is {type(text).__name__}, but must be base64 text")
    try:
        raw = _decoded(text)
    except binascii.Error as error:
        raise RolloutError(f"routed_experts is no base64 ({error})") from error
    row_bytes = 4 * layout.num_layers * layout.experts_per_token
    whole, rest = divmod(len(raw), row_bytes)
    if rest or whole != rows:
        ignored = "; routed_experts_start_len was ignored" if start and whole == rows + start else ""
        count = f"{whole} rows" if not rest else f"{len(raw) / row_bytes:.2f} rows"
        raise RolloutError(
            f"routed_experts holds {count} of {layout.num_layers} layers x {layout.experts_per_token} experts, but "
            f"{rows} rows belong to these tokens (the last one never ran){ignored}"
        )
    ids = np.frombuffer(raw, dtype="<i4").reshape(rows, layout.num_layers, layout.experts_per_token)
    if ids.size and int(ids.view("<u4").max()) >= layout.num_experts:  # a negative id is a large one there
        raise RolloutError(
            f"routed_experts holds ids from {ids.min()} to {ids.max()}, but the model has experts 0 to "
            f"{layout.num_experts - 1}"
        )
    ids = ids.astype(layout.dtype)
    if len(layout.moe_layers) != layout.num_layers:
        ids = np.ascontiguousarray(ids[:, list(layout.moe_layers)])
    if layout.experts_per_token > 1:
        doubled = (ids[..., 0] == ids[..., 1]).any(axis=1)
        if doubled.any():
            raise RolloutError(
                f"routed_experts chooses one expert twice for {int(doubled.sum())} of {rows} rows, the first of them "
                f"row {start + int(doubled.argmax())}: such rows are filling, not routes"
            )
    return ids


def _decoded(text: str) -> bytes:
    """The bytes; raises `binascii.Error` for whatever is not base64 to the last character."""
    if b64decode is None:
        return binascii.a2b_base64(text, strict_mode=bool(text))
    return b64decode(text, validate=True)


def join_routes(pieces: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    """Rows of several requests over one growing text -> rows from the first piece's start to the last one's end.

    Each piece is (its first row, [rows, l, k]). The last token of a request has no row; the next request, which runs
    that token as part of its prompt, has it. So a piece brings the boundary row with it, and rows that an earlier piece
    has already are kept: they are those of the policy that sampled.

    Raises:
        RolloutError: no pieces, or a gap between two.
    """
    if not pieces:
        raise RolloutError("no routes to join")
    first, end, parts = pieces[0][0], pieces[0][0], []
    for start, rows in pieces:
        if start > end:
            raise RolloutError(
                f"routes have a gap: rows {end} to {start - 1} came with no request; ask the next one for routes from "
                f"row {end} (routed_experts_start_len)"
            )
        parts.append(rows[end - start :])
        end = max(end, start + len(rows))
    joined = np.concatenate(parts)
    assert len(joined) == end - first
    return joined
