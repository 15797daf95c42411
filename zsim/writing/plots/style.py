"""What all pictures share: the slide, its words and colours, and how it gets into a file.

Colours are those of Okabe and Ito, "Color Universal Design" (2008), told apart by colour-blind readers, some of them
lighter or darker: what lies side by side also differs in lightness, so that the picture survives a grey printer.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

Picture = Figure
"""What every picture's `figure` makes and `save` writes."""

BLUE, SKY, ORANGE, VERMILLION, PURPLE, GREEN = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#009E73"
NAVY, AMBER, STRAW, MINT = "#002B44", "#EDAB1F", "#DCCB3C", "#B5E2D0"
PALE, GREY, DARK, SLATE, CHARCOAL, BLACK = "#EBEBEB", "#8C8C8C", "#4D4D4D", "#484848", "#383838", "#222222"
Style = tuple[str, str, str]
LINES: tuple[Style, ...] = (
    (BLUE, "o", "-"),
    (ORANGE, "s", "--"),
    (BLACK, "^", ":"),
    (VERMILLION, "D", "-."),
    (GREEN, "v", "-"),
)
"""Colour, marker and dashes of the first, second, ... line of a picture."""

WIDTH_INCHES, HEIGHT_INCHES = 10.0, 5.625
"""16:9; on a slide of 13.33 inches everything is a third larger."""
DOTS_PER_INCH = 128
"""1280 x 720 pixels; .svg and .pdf are sharp at any size."""
MARGIN_INCHES, BELOW_TITLE_INCHES = 0.3, 0.14
TITLE_POINTS, TEXT_POINTS, SMALL_POINTS = 15.0, 11.0, 10.0
LINE = 1.25
"""Height of a line of text over its size."""
POINTS_PER_INCH = 72
_SUBPIXELS = 64
"""FreeType measures text in 64ths of a pixel."""
NAME_GAP_INCHES, SAMPLE_INCHES = 0.12, 0.3
"""From the axes to the piece of a line before its name, and the length of that."""
NAME_INCHES = NAME_GAP_INCHES + SAMPLE_INCHES + 0.1
"""From the axes to the name."""
LONGEST = 500
"""Characters of a text that can have room on a slide."""
_DARKEST_PAPER = 55.0
"""Lightness above which black text is read more easily than white."""


@contextmanager
def theme() -> Iterator[None]:
    """Around everything that is drawn. What users call things is never read as a formula."""
    settings: Any = {
        "font.size": TEXT_POINTS,
        "axes.labelsize": TEXT_POINTS,
        "xtick.labelsize": TEXT_POINTS,
        "ytick.labelsize": TEXT_POINTS,
        "legend.fontsize": TEXT_POINTS,
        "hatch.linewidth": 0.8,
        "text.parse_math": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context(settings):
        yield


def slide(title: str, subtitle: str) -> tuple[Figure, float]:
    """An empty picture under its headline, and the height in inches below which it is free."""
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DOTS_PER_INCH)
    figure.set_label(title)
    width = WIDTH_INCHES - 2 * MARGIN_INCHES
    lines = wrapped(title, width, TITLE_POINTS, max_lines=2, bold=True)
    y = HEIGHT_INCHES - MARGIN_INCHES * 0.8
    _write(figure, MARGIN_INCHES, y, "\n".join(lines), size=TITLE_POINTS, weight="bold")
    y -= len(lines) * TITLE_POINTS * LINE / POINTS_PER_INCH + 0.06
    lines = wrapped(subtitle, width, TEXT_POINTS, max_lines=2)
    _write(figure, MARGIN_INCHES, y, "\n".join(lines), size=TEXT_POINTS, color=DARK)
    return figure, y - len(lines) * TEXT_POINTS * LINE / POINTS_PER_INCH - BELOW_TITLE_INCHES


def _write(figure: Figure, x_inches: float, y_inches: float, text: str, **font: Any) -> None:
    font = {"va": "top", "linespacing": LINE * 0.9, **font}
    figure.text(x_inches / WIDTH_INCHES, y_inches / HEIGHT_INCHES, text, **font)


def note(figure: Figure, text: str) -> None:
    """Along the lower edge, on one line or two: what the picture assumes."""
    lines = wrapped(text, WIDTH_INCHES - 2 * MARGIN_INCHES, SMALL_POINTS, max_lines=2)
    _write(figure, MARGIN_INCHES, 0.12, "\n".join(lines), size=SMALL_POINTS, color=DARK, va="bottom")


def panel(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at a place in inches."""
    place = (left / WIDTH_INCHES, bottom / HEIGHT_INCHES, width / WIDTH_INCHES, height / HEIGHT_INCHES)
    axes = figure.add_axes(place)
    axes.set_axisbelow(True)
    return axes


def check_lines(number: int) -> None:
    """Raises ValueError where there are more lines than can be told apart."""
    if number > len(LINES):
        raise ValueError(f"{number} experiments; allowed: at most {len(LINES)} on one picture")


def width_inches(text: str, points: float, *, bold: bool = False) -> float:
    """Of one line of text as it is drawn."""
    font = get_font(_font_file(bold))
    font.set_size(points, POINTS_PER_INCH)
    font.set_text(text)
    return float(font.get_width_height()[0]) / _SUBPIXELS / POINTS_PER_INCH


@cache
def _font_file(bold: bool) -> str:
    return str(findfont(FontProperties(weight="bold" if bold else "normal")))


def wrapped(text: str, width: float, points: float, *, max_lines: int = 1, bold: bool = False) -> list[str]:
    """Lines no wider than so many inches; what is too long for them ends in an ellipsis.

    Lines break between words, and within a name that is wider than a line behind its "_", "-" and "/".
    """

    def is_narrow(line: str) -> bool:
        return width_inches(line, points, bold=bold) <= width

    lines = [""]
    for word in text[:LONGEST].split():
        pieces = [word] if is_narrow(word) else re.findall(r"[^_/-]*[_/-]+|[^_/-]+", word)
        for index, piece in enumerate(pieces):
            longer = f"{lines[-1]}{'' if index or not lines[-1] else ' '}{piece}"
            if is_narrow(longer) or not lines[-1] or len(lines) == max_lines:
                lines[-1] = longer
            else:
                lines.append(piece)
    return [_shortened(line, is_narrow) for line in lines]


def _shortened(line: str, is_narrow: Callable[[str], bool]) -> str:
    """The line, or as much of it as there is room for with an ellipsis behind."""
    if is_narrow(line):
        return line
    length = bisect_left(range(len(line)), True, key=lambda number: not is_narrow(f"{line[:number]} …"))
    return f"{line[: max(0, length - 1)].rstrip()} …"


def name_line(axes: Axes, place: float, texts: Sequence[tuple[str, str]], style: Style, axes_inches: float) -> None:
    """Right of the axes, at a height on its scale: a piece of a line, and what is said of it.

    Args:
        axes: of the line.
        place: the middle of the texts.
        texts: one a row, with its weight.
        style: colour, marker and dashes.
        axes_inches: width of the axes.

    """
    colour, marker, dashes = style
    left, end = ((axes_inches + inches) / axes_inches for inches in (NAME_GAP_INCHES, NAME_GAP_INCHES + SAMPLE_INCHES))
    low, high = axes.get_ylim()
    row = TEXT_POINTS * LINE / POINTS_PER_INCH / (axes.get_position().height * HEIGHT_INCHES)
    top = (place - low) / (high - low) + row * (len(texts) - 1) / 2
    sample: Any = {"color": colour, "linewidth": 2.2, "markersize": 7, "clip_on": False, "transform": axes.transAxes}
    axes.plot([left, end], [top, top], dashes, marker=marker, markevery=[1], **sample)
    for index, (text, weight) in enumerate(texts):
        y = top - index * row
        axes.text(end + 0.1 / axes_inches, y, text, weight=weight, va="center", transform=axes.transAxes)


def apart(positions: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Places for labels near their positions, a distance apart, between low and high; of equals the first on top."""
    order = sorted(range(len(positions)), key=lambda index: (positions[index], -index))
    places = [min(max(positions[index], low), high) for index in order]
    for here in range(1, len(places)):
        places[here] = max(places[here], places[here - 1] + distance)
    if places and places[-1] > high:
        places[-1] = high
        for here in range(len(places) - 2, -1, -1):
            places[here] = min(places[here], places[here + 1] - distance)
    found = [0.0] * len(positions)
    for index, place in zip(order, places, strict=True):
        found[index] = place
    return found


def lightness(colour: str) -> float:
    """L* of CIELAB of "#rrggbb", 0 black to 100 white: how a grey print shows it."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    luminance: float = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance


def signed(value: float, digits: int) -> str:
    """A change with its sign; what rounds to nothing has none."""
    text = f"{value:+,.{digits}f}"
    return text.replace("-", "−") if float(text.replace(",", "")) else text[1:]


def ink_on(colour: str) -> str:
    """The colour of text that is read on it."""
    return "black" if lightness(colour) > _DARKEST_PAPER else "white"


def save(figure: Figure, path: Path) -> None:
    """Writes .png, .svg or .pdf; the same picture has the same bytes.

    The headline is the file's title, and all that is written on the picture its description.
    """
    texts = [text.get_text() for text in (*figure.texts, *(text for axes in figure.axes for text in axes.texts))]
    about = {"Title": str(figure.get_label())}
    about["Subject" if path.suffix == ".pdf" else "Description"] = "; ".join(" ".join(text.split()) for text in texts)
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    metadata: dict[str, Any] = about | undated.get(path.suffix, {})
    # On a full disk matplotlib's PDF writer trips over itself.
    content = BytesIO()
    with rc_context({"svg.hashsalt": "zsim"}):
        figure.savefig(content, format=path.suffix.removeprefix("."), metadata=metadata)
    path.write_bytes(content.getvalue())
