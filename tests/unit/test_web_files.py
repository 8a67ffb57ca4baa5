"""The page must work with no build step, no network but its own server, and a strict policy."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "characters_serve" / "web"
FILES = sorted(path.name for path in WEB.iterdir())
PAGE = (WEB / "index.html").read_text()
SCRIPT = (WEB / "page.js").read_text()
NAMESPACES = ("http://www.w3.org/2000/svg",)
STABLE_TESTIDS = {
    *("drop-zone", "talk", "stop", "mute", "interrupt", "state", "captions", "error", "stats"),
    *("video", "say-text", "say-send", "file-input", "stats-toggle", "talk-text", "unmute"),
}


class _Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))

    def values(self, attribute: str) -> list[str]:
        return [attrs[attribute] for _, attrs in self.found if attribute in attrs]


ELEMENTS = _Elements(PAGE)


def test_the_files_are_the_ones_expected() -> None:
    client = ["client.d.ts", "client.js"]
    page = ["icon.svg", "index.html", "page.js", "placing.js", "style.css"]
    assert client + page == FILES


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_server(name: str) -> None:
    text = (WEB / name).read_text()
    for namespace in NAMESPACES:
        text = text.replace(namespace, "")
    assert not re.findall(r"""(?:https?:|wss?:|data:)//\S+|["'(]//[\w.-]+\.\w+""", text)
    assert "@import" not in text


def test_what_the_page_refers_to_exists() -> None:
    references = ELEMENTS.values("src") + ELEMENTS.values("href")
    files = [reference for reference in references if not reference.startswith("#")]
    assert {"/style.css", "/page.js"} <= set(files)
    for reference in files:
        assert reference.startswith("/"), reference
        assert (WEB / reference[1:]).is_file(), reference
    ids = ELEMENTS.values("id")
    for reference in references:
        if reference.startswith("#"):
            assert reference[1:] in ids, reference


def test_modules_import_only_files_of_ours() -> None:
    for name in ("client.js", "page.js", "placing.js"):
        for module in re.findall(r'^import .*?from "(.+?)";', (WEB / name).read_text(), re.M):
            assert (WEB / module.removeprefix("/")).is_file(), module
    client = (WEB / "client.js").read_text()
    assert not re.findall(r"^import ", client, re.M), "client.js must be usable alone"


def test_ids_are_unique_and_cover_what_the_script_asks_for() -> None:
    ids = ELEMENTS.values("id")
    assert len(ids) == len(set(ids))
    asked = re.findall(r"""(?:\$|show|setText)\("([\w-]+)\"""", SCRIPT)
    assert asked
    assert set(asked) <= set(ids)
    for attribute in ("for", "aria-controls", "aria-labelledby", "aria-describedby"):
        assert set(ELEMENTS.values(attribute)) <= set(ids)


def test_nothing_inline_that_a_strict_policy_would_block() -> None:
    for tag, attributes in ELEMENTS.found:
        assert tag != "style"
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert tag != "script" or "src" in attributes


def test_stable_test_ids() -> None:
    testids = ELEMENTS.values("data-testid")
    assert len(testids) == len(set(testids))
    assert set(testids) >= STABLE_TESTIDS
    assert "gallery-card-${character.id}" in SCRIPT


def test_the_types_are_those_of_the_client() -> None:
    """Its members, its errors' codes and its events; TypeScript itself is not here to ask."""
    client, types = (WEB / "client.js").read_text(), (WEB / "client.d.ts").read_text()

    def members(text: str, of_class: str) -> set[str]:
        body = re.split(r"^}", text.split(f"class {of_class} ")[1], maxsplit=1, flags=re.M)[0]
        words = r"^  (?:static |async |get |readonly )*([a-zA-Z]\w*)(?:<[^>]*>)?(?:\(| = |: |;)"
        return set(re.findall(words, body, re.M)) - {"addEventListener"}

    assert members(client, "CharacterSession") == members(types, "CharacterSession")
    assert "start" in members(types, "CharacterSession")
    assert set(
        re.findall(r"^    this\.(\w+) = ", client.split("class CharacterSession")[0], re.M)
    ) == {
        "name",
        *members(types, "CharacterError"),
    }

    def listed(text: str, before: str, after: str) -> set[str]:
        return set(re.findall(r'"([\w-]+)"', text.split(before)[1].split(after)[0]))

    codes = listed(types, "ErrorCode =", ";")
    assert codes == listed(client, "for people:", "*/")
    assert codes == set(re.findall(r'CharacterError\(\s*"([\w-]+)"', client)) | {"busy", "http"}
    assert listed(types, "State =", ";") == listed(client, "@typedef {", "} State")
    events = set(
        re.findall(r"^  (\w+): ", types.split("interface Events {")[1].split("\n}")[0], re.M)
    )
    assert events == set(re.findall(r'#emit\("(\w+)"', client))
    header = client.split("*/")[0]
    assert events == set(re.findall(r"^ \*   (\w+) {2,}\S", header, re.M))

    def fields(of: str) -> set[str]:
        return set(re.findall(r"(\w+)\??:", of))

    inline = types.split("interface Events {")[1].split("\n}")[0]
    declared = dict(re.findall(r"^  (\w+): \{(.*?)\};$", inline, re.M | re.S))
    declared["metrics"] = types.split("interface Metrics {")[1].split("\n}")[0]
    described = dict(re.findall(r"^ \*   (\w+) .*?\{(.+)\}", header, re.M))
    assert set(declared) | {"audioblocked", "error"} == events
    for event, names in declared.items():
        words = re.sub(r": [^,]+", "", described[event])
        assert set(words.split(", ")) == fields(names), event
