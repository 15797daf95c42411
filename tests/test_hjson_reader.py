"""Configurations are read as DeepSpeed reads them: held against the reader that it uses, and line by line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.reading.documents import InputError, parse

NAMES = st.sampled_from(
    ["stage", "zero_optimization", "reduce_bucket_size", "a.b", "bf16", "x-y", " stage", "_comment"]
)
NUMBERS = st.sampled_from(["0", "-3", "5e8", "1.5e-5", "6.710886e+07", "1e14", "0.9", "15099494.4", "500000000"])
TEXTS = st.text(alphabet="abc/#,:{}[]\"'\\ \té🦜*", max_size=8)
GAPS = st.sampled_from(
    ["", " ", "\t", "\n", "\r\n", "# what, {for}\n", "// no: ]\n", "/* a\n, b */", " /**/ ", "\n\n  "]
)


@st.composite
def decorated(draw, depth=3):
    """A value as people write it: comments and blanks anywhere, commas trailing or left out at line ends."""
    kind = draw(st.sampled_from(["number", "word", "text", "list", "mapping"] if depth else ["number", "word", "text"]))
    if kind == "number":
        return draw(NUMBERS)
    if kind == "word":
        return draw(st.sampled_from(["true", "false", "null"]))
    if kind == "text":
        return quoted(draw)
    parts = []
    names = draw(st.lists(NAMES, max_size=4, unique=True))
    for number, name in enumerate(names):
        last = number == len(names) - 1
        comma = draw(st.sampled_from([",", "\n", ",\n"] + [""] * last))
        key = f"{label(draw, name)}:{draw(GAPS)}" if kind == "mapping" else ""
        parts.append(f"{draw(GAPS)}{key}{draw(decorated(depth - 1))}{draw(GAPS)}{comma}")
    body = "".join(parts) + draw(GAPS)
    return f"{{{body}}}" if kind == "mapping" else f"[{body}]"


def quoted(draw):
    text = draw(TEXTS)
    written = json.dumps(text, ensure_ascii=draw(st.booleans()))
    return written if draw(st.booleans()) or '"' in text or "'" in text else f"'{written[1:-1]}'"


def label(draw, name):
    bare = " " not in name and draw(st.booleans())
    return name if bare else json.dumps(name) + draw(st.sampled_from(["", " ", "\t"]))


@settings(max_examples=400, deadline=None)
@given(decorated(), GAPS, GAPS, st.sampled_from(["", "\ufeff"]))
def test_values_are_those_that_deepspeed_reads(value, before, after, mark):
    hjson = pytest.importorskip("hjson", reason="comes with deepspeed, of the extra `peers`")
    text = f"{mark}{before}{{ given: {value}\n}}{after}"
    assert parse(text.encode(), "ds.json", json=True).data == hjson.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, # why\n "b": 2 // too\n}',
        '{"a": /* one */ 5e8, /* two */ "b": [1, 2,],}',
        "{a: AdamW\n b: /local_nvme/x\n}",
        "# no braces\nstage: 3\nname: none\n",
        '{"a": {"b": "http://c#d"}, "e": null}',
        "{a: -1\n b: 1e-5,\n c: [true\n false]}",
        '\ufeff{"a": "\\u00e9\\ud83e\\udd9c\\/"}',
        '{"a":\n\n1}\n// end',
    ],
)
def test_examples_are_read_as_deepspeed_reads_them(text):
    hjson = pytest.importorskip("hjson", reason="comes with deepspeed, of the extra `peers`")
    assert parse(text.encode(), "ds.json", json=True).data == hjson.loads(text)


def test_each_key_knows_its_line():
    text = b'{ // first\n\n"a": {\n /* two\n lines */ "b": 1, c:\n2},\r\n"d": [{"e": 1},\n{"f": 2}]}'
    document = parse(text, "ds.json", json=True)
    assert document.data == {"a": {"b": 1, "c": 2}, "d": [{"e": 1}, {"f": 2}]}
    lines = {".".join(keys): line for keys, line in document.lines.items()}
    assert lines == {"a": 3, "a.b": 5, "a.c": 5, "d": 7, "d.[].e": 7, "d.[].f": 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "a": 2}', "x.json:2: a is given twice; allowed: once"),
        ('{"z": {"a": 1, a: 2}}', "x.json:1: z.a is given twice"),
        ('{\n"stage": ZERO_STAGE,\n}', "x.json:2: stage: the unquoted text 'ZERO_STAGE', perhaps a placeholder"),
        ('{"a": True, "b": 1}', "x.json:1: a: the unquoted text 'True'"),
        ('{"a": nan}', "the unquoted text 'nan'"),
        ('{"a": Adam # which one\n}', "the unquoted text 'Adam'"),
        ('{"a": 1 "b": 2}', "the unquoted text '1 \"b\": 2'"),
        ('{"a": }', "no value for a"),
        ('{"a": ,}', "no value for a"),
        ('{"a" 1}', "no colon behind 'a'"),
        ('{"a": 1', "a mapping without its end"),
        ('{"a": [1', "a list without its end"),
        ('{"a": "b\n"}', "a text without its end, or with a line break in it"),
        ('{"a": "\\x"}', "the unknown escape \\x"),
        ('{"a": "\\u12"}', "the unknown escape \\u"),
        ("{a: '''b'''}", "a text of several lines"),
        ('{"a": 1} {', "more text behind the end"),
        ('{"a": 1 /* b}', "x.json:1: "),
        ("/* b", "a comment without its end"),
        ("{{", "no key"),
        ("{a b: 1}", "no key"),
        ('{"a": ' + "[" * 40, "nested deeper than 32 levels"),
        ('{"a": ' + "9" * 100 + "}", "a number of 100 digits"),
        ('{"a": 1e999}', "beyond any finite number"),
        ('{"a": "\\ud83d"}', "half a surrogate pair"),
        ("[1]", "the top level is a list"),
        ("3", "the top level is a int"),
        ("# nothing", "the top level is empty"),
    ],
)
def test_refuses_in_one_line(text, message):
    with pytest.raises(InputError, match=r"\A[^\n]+\Z") as error:
        parse(text.encode(), "x.json", json=True)
    assert message in str(error.value)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="{}[]:,\"'\\#/*\n\t a1.-eu", max_size=60))
def test_any_punctuation(text):
    refusal = ""
    try:
        parse(text.encode(), "x.json", json=True)
    except InputError as error:
        refusal = str(error)
    assert "\n" not in refusal
