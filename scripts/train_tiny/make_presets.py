"""Renders the preset characters and writes their descriptions.

    python scripts/train_tiny/make_presets.py

Each is a seed of :func:`sample_characters` with a few attributes set by hand.  Training draws its
characters from other seeds, so the model has never seen any of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from PIL import Image
from torch import Tensor

from scripts.train_tiny.renderer import (
    ATTRIBUTE_NAMES,
    NUM_CONTROLS,
    Renderer,
    sample_characters,
)

ASSETS: Final = Path(__file__).resolve().parents[2] / "characters_serve/assets/characters"

_PORTRAIT: Final = {
    "scale": 0.764, "head_size": 0.571, "offset": 0.5, "offset_y": 0.5, "tilt": 0.5, "turn": 0.5,
    "nod": 0.5, "lean": 0.5, "lopsided": 0.5, "hair_length": 0.5, "hair_volume": 0.5,
    "horns": 0.6, "parting": 0.4,
    "make_up": 0.3, "light_contrast": 0.4, "light_height": 0.7, "light_warmth": 0.6,
    "contrast": 0.5, "saturation": 0.7, "exposure": 0.5, "vignette": 0.4, "grain": 0.2,
}  # fmt: skip
"""How the presets are seen: from the front, in the middle, in plain light."""

PRESETS: Final[list[dict[str, Any]]] = [
    {
        "id": "mira",
        "name": "Mira",
        "style": "soft 3D human",
        "attributes_seed": 900_001,
        "attributes": {
            "kind": 0.2, "style": 0.5, "skin": 0.38, "age": 0.4, "feminine": 0.2, "hair_style": 0.7,
            "offset_y": 0.8225,
            "hair_colour": 0.16, "fringe": 0.7, "curl": 0.2, "glasses": 0.1, "glasses_kind": 0.3,
            "hat": 0.9, "cloth_kind": 0.06, "cloth_hue": 0.52, "cloth_value": 0.5,
            "background": 0.45, "background_hue": 0.08, "smile": 0.8, "lip_colour": 0.5,
            "freckles": 0.9, "iris": 0.05, "eye_size": 0.7, "brow_angle": 0.35,
        },
        "age": 29,
        "home": "a small flat above the old library in Lisbon",
        "job": "librarian",
        "likes": ["mystery novels", "rainy afternoons", "cinnamon tea", "tram rides"],
        "favourite_colour": "teal",
        "favourite_food": "custard tarts",
        "fun_fact": "I once found a love letter from 1912 inside a cookbook.",
        "greeting": "Hi there! I'm Mira. Are you looking for a good story?",
        "persona": "I'm Mira, a librarian who lives right above the books she looks after. I love "
        "mysteries, rainy afternoons and recommending exactly the right story. Ask me anything, "
        "I have probably read about it.",
    },
    {
        "id": "bruno",
        "name": "Bruno",
        "style": "clay bear",
        "attributes_seed": 900_002,
        "attributes": {
            "kind": 0.7, "species": 0.06, "style": 0.7, "skin": 0.05, "fringe": 0.1, "glasses": 0.9,
            "hat": 0.9, "cloth_kind": 0.19, "cloth_hue": 0.98, "cloth_value": 0.8, "smile": 0.9,
            "cloth_saturation": 0.8, "background": 0.25, "background_hue": 0.12,
            "markings": 0.9, "brow_angle": 0.3, "eye_size": 0.6,
        },
        "age": 41,
        "home": "a cosy bakery at the edge of the forest",
        "job": "baker",
        "likes": ["warm bread", "wild honey", "long naps", "brass bands"],
        "favourite_colour": "golden brown",
        "favourite_food": "blueberry pancakes with honey",
        "fun_fact": "I can sleep for four months without an alarm clock.",
        "greeting": "Hello, hello! Bruno here. Come in, the bread is still warm.",
        "persona": "I'm Bruno, a bear and a baker, and my bakery stands at the edge of the forest. "
        "I like warm bread, wild honey and a good long nap. My rolls are big, and so are my hugs.",
    },
    {
        "id": "arthur",
        "name": "Arthur",
        "style": "soft 3D human",
        "attributes_seed": 900_003,
        "attributes": {
            "kind": 0.2, "style": 0.48, "skin": 0.15, "age": 0.9, "feminine": 0.8, "beard": 0.1,
            "moustache": 0.1, "hair_style": 0.25, "strands": 0.85, "fringe": 0.5, "hat": 0.05,
            "hat_colour": 0.6, "glasses": 0.9, "cloth_kind": 0.19, "cloth_hue": 0.6,
            "cloth_value": 0.3, "background": 0.25, "background_hue": 0.55,

            "smile": 0.8, "iris": 0.5, "freckles": 0.9, "jaw": 0.3, "brow_angle": 0.4, "curl": 0.2,
        },
        "age": 72,
        "home": "a lighthouse on the Scottish coast",
        "job": "retired lighthouse keeper",
        "likes": ["sea shanties", "strong tea", "knots", "watching storms"],
        "favourite_colour": "navy blue",
        "favourite_food": "fish pie",
        "fun_fact": "I have counted four thousand two hundred ships from my window.",
        "greeting": "Ahoy! I'm Arthur. Pull up a chair, the kettle is on.",
        "persona": "I'm Arthur, and I kept a lighthouse on the Scottish coast for forty years. I "
        "like strong tea, sea shanties and a proper storm. I know a story for every ship that "
        "ever passed.",
    },
    {
        "id": "pixel",
        "name": "Pixel",
        "style": "robot",
        "attributes_seed": 900_004,
        "attributes": {
            "kind": 0.88, "style": 0.5, "skin": 0.55, "skin_tint": 0.75, "iris": 0.5,
            "nose_kind": 0.8, "hat": 0.9, "cloth_kind": 0.44, "cloth_hue": 0.07, "cloth_value": 0.9,
            "cloth_saturation": 0.8, "background": 0.15, "background_hue": 0.7,
            "smile": 0.8, "eye_size": 0.6, "glasses": 0.9,
        },
        "age": 3,
        "home": "a sunny workshop full of spare parts",
        "job": "repair robot",
        "likes": ["blinking lights", "tidy cables", "chess", "puns"],
        "favourite_colour": "electric blue",
        "favourite_food": "a fresh battery",
        "fun_fact": "I learned to whistle before I learned to walk.",
        "greeting": "Beep! I mean, hello! I'm Pixel. What shall we fix today?",
        "persona": "I'm Pixel, a repair robot from a sunny workshop full of spare parts. I like "
        "blinking lights, tidy cables and terrible puns. If something is broken, I get "
        "very excited.",
    },
    {
        "id": "saffron",
        "name": "Saffron",
        "style": "flat cartoon fox",
        "attributes_seed": 900_005,
        "attributes": {
            "kind": 0.7, "species": 0.3, "style": 0.9, "skin": 0.1, "hat": 0.9, "glasses": 0.9,
            "cloth_kind": 0.44, "cloth_hue": 0.45, "cloth_value": 0.5, "background": 0.05,
            "background_hue": 0.50, "smile": 0.9, "fringe": 0.9,
            "brow_angle": 0.4, "iris": 0.5, "eye_size": 0.6, "lashes": 0.5,
        },
        "age": 24,
        "home": "a painted caravan that never stays anywhere for long",
        "job": "travelling storyteller",
        "likes": ["riddles", "campfires", "autumn leaves", "tambourines"],
        "favourite_colour": "orange",
        "favourite_food": "roasted chestnuts",
        "fun_fact": "I have never told the same story the same way twice.",
        "greeting": "Psst, hello! I'm Saffron. Would you like to hear a riddle?",
        "persona": "I'm Saffron, a fox who travels in a painted caravan and tells stories for a "
        "living. I like riddles, campfires and the smell of autumn. Be careful, some of my "
        "stories are even true.",
    },
    {
        "id": "kofi",
        "name": "Kofi",
        "style": "lifelike human",
        "attributes_seed": 900_006,
        "attributes": {
            "kind": 0.2, "style": 0.1, "skin": 0.78, "age": 0.5, "feminine": 0.8,
            "hair_style": 0.35, "hair_colour": 0.02, "beard": 0.45, "moustache": 0.8,
            "hat": 0.9, "glasses": 0.9,
            "cloth_kind": 0.56, "cloth_hue": 0.13, "cloth_value": 0.75, "cloth_saturation": 0.9,
            "background": 0.35, "background_hue": 0.95, "smile": 0.9,
            "iris": 0.02, "freckles": 0.9, "brow_angle": 0.35, "background_seed": 0.8,
            "strands": 0.3,
        },
        "age": 34,
        "home": "Accra, in a house with a very loud piano",
        "job": "music teacher",
        "likes": ["jazz", "football", "spicy food", "old vinyl records"],
        "favourite_colour": "yellow",
        "favourite_food": "jollof rice",
        "fun_fact": "I can play the trumpet and the drums at the same time, but not well.",
        "greeting": "Hey, good to see you! I'm Kofi. How is your day sounding?",
        "persona": "I'm Kofi, a music teacher from Accra with a very loud piano. I like jazz, "
        "football and food that is almost too spicy. I believe that everybody can sing.",
    },
    {
        "id": "zibo",
        "name": "Zibo",
        "style": "clay alien",
        "attributes_seed": 900_007,
        "attributes": {
            "kind": 0.97, "style": 0.7, "skin": 0.12, "skin_tint": 0.7, "age": 0.8, "iris": 0.75,
            "hat": 0.9, "cloth_kind": 0.19, "cloth_hue": 0.75, "cloth_value": 0.6,
            "background": 0.15, "background_hue": 0.66, "background_value": 0.2, "smile": 0.9,
            "brow_angle": 0.2, "eye_tilt": 0.5, "brow_height": 0.9, "eye_shape": 0.9, "lashes": 0.2,
        },
        "age": 212,
        "home": "a moon with two sunsets, but now a garden shed in Kent",
        "job": "collector of Earth words",
        "likes": ["umbrellas", "the word marmalade", "bicycles", "pigeons"],
        "favourite_colour": "ultraviolet",
        "favourite_food": "marmalade on toast",
        "fun_fact": "On my moon we wave hello with our antennas.",
        "greeting": "Greetings, Earth friend! I'm Zibo. Please tell me a new word.",
        "persona": "I'm Zibo, and I come from a moon with two sunsets, though I live in a garden "
        "shed now. I collect Earth words, and marmalade is my favourite. I'm two hundred and "
        "twelve, which is rather young.",
    },
    {
        "id": "poppy",
        "name": "Poppy",
        "style": "flat cartoon human",
        "attributes_seed": 900_008,
        "attributes": {
            "kind": 0.2, "style": 0.9, "skin": 0.06, "age": 0.3, "feminine": 0.2,
            "hair_style": 0.45,
            "hair_colour": 0.37, "fringe": 0.3, "hat": 0.9, "glasses": 0.9, "freckles": 0.05,
            "cloth_kind": 0.44, "cloth_hue": 0.36, "cloth_value": 0.5, "background": 0.25,
            "background_hue": 0.14, "smile": 0.9, "iris": 0.8,
            "eye_size": 0.8, "brow_angle": 0.3, "lip_colour": 0.4, "curl": 0.3, "eye_shape": 0.8,
        },
        "age": 22,
        "home": "a greenhouse in Yorkshire, more or less",
        "job": "gardener",
        "likes": ["sunflowers", "muddy boots", "ladybirds", "playing the ukulele"],
        "favourite_colour": "green",
        "favourite_food": "strawberry jam",
        "fun_fact": "I once grew a pumpkin that was heavier than my brother.",
        "greeting": "Hiya! I'm Poppy. Mind the seedlings, and tell me how you are.",
        "persona": "I'm Poppy, a gardener, and I more or less live in a greenhouse in Yorkshire. I "
        "like sunflowers, ladybirds and muddy boots. Plants grow better when you talk to "
        "them, so I talk a lot.",
    },
]  # fmt: skip


def preset_attributes(preset: dict[str, Any]) -> Tensor:
    """Attributes of a preset, float32 (1, NUM_ATTRIBUTES)."""
    generator = torch.Generator().manual_seed(preset["attributes_seed"])
    attributes = sample_characters(1, generator, "cpu")
    for name, value in (_PORTRAIT | preset["attributes"]).items():
        attributes[0, ATTRIBUTE_NAMES.index(name)] = value
    return attributes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ASSETS)
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    renderer = Renderer("cpu", batch=1)
    for preset in PRESETS:
        picture = renderer(preset_attributes(preset), torch.zeros(1, NUM_CONTROLS))[0]
        pixels = (picture.permute(1, 2, 0) * 255.0).round().to(torch.uint8).numpy()
        Image.fromarray(pixels).save(out / f"{preset['id']}.png", optimize=True)
    text = json.dumps(PRESETS, indent=2, ensure_ascii=False) + "\n"
    (out / "characters.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
