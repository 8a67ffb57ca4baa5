"""Which `traceparent` headers are followed, by the rules of W3C Trace Context."""

from __future__ import annotations

import pytest

from characters_serve.gateway.trace_context import trace_id_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    "sent", [f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00", f"cc-{TRACE}-{PARENT}-01-more"]
)
def test_a_valid_one_is_followed(sent: str) -> None:
    assert trace_id_of([sent]) == TRACE


@pytest.mark.parametrize(
    "sent",
    [
        "",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-01-more",
        f"cc-{TRACE}-{PARENT}-01more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01\n",
    ],
)
def test_anything_else_begins_a_new_trace(sent: str) -> None:
    new = {trace_id_of([sent]), trace_id_of([sent])}
    assert len(new) == 2 and all(len(made) == 32 and made not in sent for made in new)


def test_none_or_two_begin_a_new_trace() -> None:
    valid = f"00-{TRACE}-{PARENT}-01"
    assert TRACE not in (trace_id_of([]), trace_id_of([valid, valid]))
