"""In: the preset characters' folder, or a form's name and words. Out: personas and pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from characters_serve.messages import Persona

ASSETS = Path(__file__).parent.parent / "assets" / "characters"
_FACTS = ("age", "home", "job", "favourite_colour", "favourite_food", "fun_fact")
DEFAULT_NAME = "Robin"


@dataclass(frozen=True, slots=True)
class Character:
    character_id: str
    style: str
    blurb: str
    persona: Persona
    image_path: Path


def load_characters(folder: Path = ASSETS) -> dict[str, Character]:
    """By id, in the order of the file; an incomplete entry is an error at start, not in a call."""
    listed = folder / "characters.json"
    if not listed.exists():
        return {}
    return {
        entry["id"]: _character(entry, folder) for entry in json.loads(listed.read_text("utf-8"))
    }


def _character(entry: dict[str, Any], folder: Path) -> Character:
    image_path = folder / entry.get("image", f"{entry['id']}.png")
    if not image_path.is_file():
        raise FileNotFoundError(f"{image_path}: the picture of preset character {entry['id']!r}")
    persona = entry.get("persona", "")
    details = {**entry, **persona} if isinstance(persona, dict) else entry
    instructions = persona if isinstance(persona, str) else persona.get("instructions", "")
    return Character(
        entry["id"],
        details.get("style", ""),
        details.get("blurb", instructions),
        Persona(
            name=details["name"],
            greeting=details.get("greeting", f"Hi, I'm {details['name']}."),
            facts={key: str(details[key]) for key in _FACTS if key in details},
            likes=[str(like) for like in details.get("likes", [])],
            instructions=instructions,
        ),
        image_path,
    )


def visitor_persona(name: str | None, words: str | None) -> Persona:
    """Of an uploaded picture: what its owner said of it, and nothing invented."""
    name = name or DEFAULT_NAME
    return Persona(
        name=name,
        greeting=f"Hi, I'm {name}. It's lovely to meet you. What shall we talk about?",
        facts={},
        likes=[],
        instructions=words or "",
    )


@cache
def image_bytes(path: Path) -> bytes:
    return path.read_bytes()
