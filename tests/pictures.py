"""What has to hold for every picture: its texts are inside and apart."""

from itertools import combinations

from matplotlib.text import Text

TOUCH_PIXELS = 0.5
"""Boxes of text that share less than this only touch."""


def texts_of(figure):
    """Every visible text of a drawn figure with its box in pixels."""
    figure.draw_without_rendering()
    return [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and not _is_hidden_tick(figure, text)
    ]


def _is_hidden_tick(figure, text):
    """An axis keeps labels for ticks outside its limits, which are not drawn."""
    for axes in figure.axes:
        if not axes.axison:
            if text in {*axes.get_xticklabels(), *axes.get_yticklabels()}:
                return True
            continue
        for axis, (low, high) in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
            for tick in (*axis.majorTicks, *axis.minorTicks):
                if text in {tick.label1, tick.label2}:
                    return not low - 1e-9 <= tick.get_loc() <= high + 1e-9
    return False


def inside_and_apart(figure):
    """The texts; fails where one leaves the canvas or overlaps another."""
    boxes = texts_of(figure)
    width, height = figure.get_size_inches() * figure.dpi
    assert [text for text, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height] == []
    assert [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if _overlap(one, other)] == []
    return [text for text, _ in boxes]


def _overlap(one, other):
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return min(width, height) > TOUCH_PIXELS
