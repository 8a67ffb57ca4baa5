"""In: an SDP offer of a stranger. Out: the same offer without candidates, or `OfferRefused`.

Candidates are dropped: the browser reaches the server's own, and is learnt from its checks. So a
stranger's host names are never looked up and its addresses never probed. Knows nothing of aiortc's
peer connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_OFFER_BYTES: Final = 64 * 1024
MAX_MEDIA_SECTIONS: Final = 8
MAX_LINE_CHARACTERS: Final = 4096
_DIRECTIONS: Final = ("sendrecv", "sendonly", "recvonly", "inactive")


class OfferRefused(ValueError):
    """The offer cannot be used; the message says why in words for its author."""


def check_offer(sdp: str) -> str:
    if len(sdp) > MAX_OFFER_BYTES or len(sdp.encode("utf-8", "replace")) > MAX_OFFER_BYTES:
        raise OfferRefused(f"the offer is larger than {MAX_OFFER_BYTES} bytes")
    # As aiortc reads it: a line that hides behind a form feed is a line there.
    lines = [line for line in sdp.splitlines() if line]
    if not lines or lines[0] != "v=0":
        raise OfferRefused("the offer is not SDP: it must begin with v=0")
    if any(len(line) > MAX_LINE_CHARACTERS or "\0" in line for line in lines):
        raise OfferRefused("the offer has a line that is too long or holds a NUL")
    common, sections = _sections(lines)
    kinds = [section[0][2:].split(" ")[0] for section in sections]
    if not sections or len(sections) > MAX_MEDIA_SECTIONS:
        raise OfferRefused(f"the offer must have 1 to {MAX_MEDIA_SECTIONS} media sections")
    for kind, limit in (("audio", 1), ("video", 1), ("application", 1)):
        if kinds.count(kind) > limit:
            raise OfferRefused(f"the offer has more than one {kind} section")
    if unknown := set(kinds) - {"audio", "video", "application"}:
        raise OfferRefused(f"the offer has an unknown media kind: {sorted(unknown)[0][:20]!r}")
    for kind, section in zip(kinds, sections, strict=True):
        _check_section(kind, section, common)
    for kind in ("audio", "video"):
        if kind not in kinds:
            raise OfferRefused(f"the offer has no {kind} section")
        direction = _direction(sections[kinds.index(kind)], common)
        if direction not in ("sendrecv", "recvonly"):
            raise OfferRefused(f"the offer's {kind} is {direction}; it must be able to receive")
    kept = [line for line in lines if not line.startswith(("a=candidate", "a=end-of-candidates"))]
    return "\r\n".join(kept) + "\r\n"


def _sections(lines: list[str]) -> tuple[list[str], list[list[str]]]:
    common: list[str] = []
    sections: list[list[str]] = []
    for line in lines:
        if line.startswith("m="):
            sections.append([])
        (sections[-1] if sections else common).append(line)
    return common, sections


def _check_section(kind: str, section: Sequence[str], common: Sequence[str]) -> None:
    attributes = [*common, *section]
    setup = _attribute(attributes, "setup")
    if setup != "actpass":
        raise OfferRefused("a=setup must be actpass: this is an answer, or no offer for WebRTC")
    if not any(line.lower().startswith("a=fingerprint:sha-256 ") for line in attributes):
        raise OfferRefused(f"the {kind} section has no sha-256 fingerprint")
    if not _attribute(attributes, "ice-ufrag") or not _attribute(attributes, "ice-pwd"):
        raise OfferRefused(f"the {kind} section has no ICE credentials")


def _attribute(lines: Sequence[str], name: str) -> str | None:
    """The last value of an attribute: a section's own overrides the session's."""
    prefix = f"a={name}:"
    found = [line[len(prefix) :] for line in lines if line.startswith(prefix)]
    return found[-1].strip() if found else None


def _direction(section: Sequence[str], common: Sequence[str]) -> str:
    for lines in (section, common):
        for line in lines:
            if line[2:] in _DIRECTIONS and line.startswith("a="):
                return line[2:]
    return "sendrecv"
