"""The tables of docs/deepspeed_config.md are made from the tables of keys: `python tests/test_deepspeed_docs.py`."""

import re
from pathlib import Path

from zsim.imports import deepspeed_keys as keys
from zsim.imports import deepspeed_sections as sections

PAGE = Path(__file__).parents[1] / "docs" / "deepspeed_config.md"
SLOT = re.compile(r"(<!-- {} -->\n).*?(<!-- end -->)", re.DOTALL)


def table(header, rows):
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"


def zero_rows():
    versions = {"2021": "0.5, 0.6", "2025": "0.18", "2026": "0.19"}
    for spelling in sorted(keys.ZERO_KNOWN, key=lambda name: (name.removeprefix("stage3_"), name)):
        known = ", ".join(label for time, label in versions.items() if spelling in keys.GRAMMARS[time].zero)
        renamed = keys.RENAMED.get(spelling)
        name = keys.ALIASES.get(renamed or spelling, renamed or spelling)
        stages = "3" if name in keys.ONLY_STAGE_3 else "1, 2" if name in keys.ONLY_STAGE_1_2 else "1, 2, 3"
        text = f"old name of `{renamed}`: {meaning(name)}" if renamed else meaning(name)
        yield [f"`{spelling}`", known or "releases between", "all" if name == "stage" else stages, text]


def meaning(name):
    if name in keys.SIZES:
        return f"{keys.MEANINGS[name]}; {keys.SIZES[name][0]:,}"
    if name in keys.MEANINGS:
        return keys.MEANINGS[name]
    if name in keys.ZERO_IDLE:
        return f"no effect: {keys.ZERO_IDLE[name]}"
    if name in keys.OFFLOAD_SECTIONS:
        return 'not modelled: offload; `null` and `device: "none"` are read'
    effect, off = keys.ZERO_NOT_MODELLED[name]
    return f"not modelled: {effect}; off at {shown_off(off)}"


def shown_off(values):
    return " or ".join(f"`{'null' if value is None else str(value).lower()}`" for value in values)


def top_rows():
    for name in sorted(sections.KNOWN):
        if name in sections.RENAMED:
            text = f"old name of `{sections.RENAMED[name]}`"
        elif name in sections.READ:
            text = f"read: {sections.READ[name]}"
        elif name in sections.NEUTRAL:
            text = f"no part in a step: {sections.NEUTRAL[name]}"
        elif name in sections.SAID_OUT_LOUD:
            text = f"no effect: {sections.SAID_OUT_LOUD[name][0]}"
        elif name in sections.SECTIONS_SAID_OUT_LOUD:
            text = f"no effect: {sections.SECTIONS_SAID_OUT_LOUD[name]}"
        else:
            effect = (sections.SECTIONS_NOT_MODELLED | sections.FLAGS_NOT_MODELLED)[name][0]
            text = f"not modelled: {effect}"
        refused = "; refused by 0.19.8" if name in keys.REMOVED_SECTIONS_IN_0_19 else ""
        yield [f"`{name}`", text + refused]


def page():
    zero = table(["key", "known to", "stages", "what zsim makes of it; default"], zero_rows())
    top = table(["key", "what zsim makes of it"], top_rows())
    text = PAGE.read_text("utf-8")
    for name, content in (("zero_optimization", zero), ("top level", top)):
        slot = re.compile(SLOT.pattern.format(name), re.DOTALL)
        assert slot.search(text), name
        text = slot.sub(lambda match, content=content: match[1] + content + match[2], text)
    return text


def test_the_page_tells_every_key():
    assert PAGE.read_text("utf-8") == page(), "run `python tests/test_deepspeed_docs.py`"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
