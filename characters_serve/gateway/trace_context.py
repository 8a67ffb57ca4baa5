"""In: a request's `traceparent` headers. Out: the id of the trace that it is part of.

As W3C Trace Context, level 1, has them: version, trace id, parent id and flags, in hex. A session
is part of the trace of the request that made it. Knows no log and no session.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

HEADER = "traceparent"
# Version ff and ids of zeros are forbidden; only versions after 00 may say more.
_TRACEPARENT = re.compile(
    r"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)


def trace_id_of(traceparents: Sequence[str]) -> str:
    """The caller's trace, where it sent one header that is valid; else a new one."""
    valid = _TRACEPARENT.fullmatch(traceparents[0]) if len(traceparents) == 1 else None
    return valid[1] if valid else secrets.token_hex(16)


def traceresponse(trace_id: str) -> str:
    """The answer's header, after the W3C's draft; not sampled: no span is recorded of it."""
    return f"00-{trace_id}-{secrets.token_hex(8)}-00"
