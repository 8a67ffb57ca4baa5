"""In: addresses, times and request bodies. Out: too often, too much, too slow. Knows no route."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import OrderedDict

from starlette.requests import ClientDisconnect, Request

from characters_serve.gateway.problems import Problem

MAX_TRACKED = 10_000
BODY_TIMEOUT_S = 30.0
DROPPED_SHARE = 4


class RateLimiter:
    """A token bucket for each key: `per_minute` at once, refilled evenly over a minute."""

    def __init__(self, per_minute: int) -> None:
        self._capacity = float(per_minute)
        self._refill_per_s = per_minute / 60.0
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def retry_after_s(self, key: str, now_s: float) -> float | None:
        """None when the call is within the limit (and is counted), else how long to wait."""
        tokens, then_s = self._buckets.pop(key, (self._capacity, now_s))
        tokens = min(self._capacity, tokens + (now_s - then_s) * self._refill_per_s)
        wait_s = None if tokens >= 1 else (1 - tokens) / self._refill_per_s
        self._buckets[key] = (tokens - 1 if wait_s is None else tokens, now_s)
        if len(self._buckets) > MAX_TRACKED:
            self._buckets.popitem(last=False)
        return wait_s


def address_key(host: str | None) -> str:
    """One client: an IPv4 address, or the /64 that an IPv6 client can roam in."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return host or "unknown"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


async def read_body(request: Request, max_bytes: int, field: str | None = None) -> bytes:
    """The whole body, given up as soon as it is too long or takes too long to arrive.

    Of a body that is somewhat too long the rest is read and dropped: a browser that is cut off in
    the middle of an upload reports a broken connection and never shows the answer.
    """
    too_long = Problem(413, f"the body is longer than {max_bytes} bytes", field=field)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > DROPPED_SHARE * max_bytes:
        raise too_long
    chunks = bytearray()
    length = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                length += len(chunk)
                if length <= max_bytes:
                    chunks += chunk
                elif length > DROPPED_SHARE * max_bytes:
                    raise too_long
    except TimeoutError:
        raise Problem(408, "the body took too long to arrive") from None
    except ClientDisconnect:
        raise Problem(400, "the client went away") from None
    if length > max_bytes:
        raise too_long
    return bytes(chunks)
