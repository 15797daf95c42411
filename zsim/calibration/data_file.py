"""The text of a data file with measured numbers: YAML that `reading` accepts, a number a line."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def text(data: Mapping[str, Any], comments: Sequence[str] = ()) -> str:
    """A topology, device or software file.

    Args:
        data: mappings of mappings; one with a `value`, such as `Measured.as_data` gives, becomes one line.
        comments: lines above it.

    """
    return "".join(f"{line}\n" for line in [*(f"# {comment}" for comment in comments), *_lines(data, "")])


def _lines(data: Mapping[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    for key, value in data.items():
        if isinstance(value, Mapping) and "value" not in value:
            lines += [f"{indent}{key}:", *_lines(value, f"{indent}  ")]
        else:
            lines.append(f"{indent}{key}: {flow(value)}")
    return lines


def flow(value: object) -> str:
    """JSON is YAML, but for the marks around keys, which nobody writes; text is always quoted."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
