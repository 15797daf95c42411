"""The one door for YAML and JSON."""

import os

import pytest

from zsim.reading.documents import MAX_BYTES, InputError, nearest, parse, parse_value, read


def test_values_and_lines():
    document = parse(b"a: 1\nb:\n  c: [5e8, .5, 1_000, yes, 12:30, null]\n  d: {e: 'x'}\n", "f.yaml")
    assert document.data == {"a": 1, "b": {"c": [5e8, 0.5, 1000, "yes", "12:30", None], "d": {"e": "x"}}}
    assert document.where("b", "c") == "f.yaml:3: b.c"
    assert document.where("b", "d", "e") == "f.yaml:4: b.d.e"
    assert document.where("b", "missing") == "f.yaml:2: b.missing"
    assert document.where() == "f.yaml"


def test_keys_are_text_and_words_of_python_are_read():
    assert parse(b"2021: True\n3: False\nx: None", "f").data == {"2021": True, "3": False, "x": None}


def test_json_with_tabs_comments_and_trailing_commas():
    content = b'\xef\xbb\xbf{\n\t"a":1,  # why\n\t"b": [1e5, {"c": "\\u00e9"},],\n}\n'
    assert parse(content, "f.json", json=True).data == {"a": 1, "b": [1e5, {"c": "é"}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "f: the top level is empty"),
        (b"- 1", "f: the top level is a list"),
        (b"just words", "f: the top level is a str"),
        (b"a: 1\na: 2", "f:2: a is given twice"),
        (b"x: {a: 1, a: 2}", "f:1: x.a is given twice"),
        (b"a: !!python/object/apply:os.system [ls]", "f:1: the tag"),
        (b"a: !!int 3", "f:1: the tag"),
        (b"a: &x 1\nb: *x", "f:1: an anchor or alias 'x'"),
        (b"a: 1\n---\nb: 2", "f:2: a second document"),
        (b"a: [1, 2", "f:1: not well-formed"),
        (b"a: {b: ", "not well-formed"),
        (b"\x89PNG\r\n\x1a\n\x00", "f: not a text file"),
        (b"a: \x00", "f: not a text file"),
        (b"\xff\xfea\x00", "f: not a text file"),
        (b"? [1, 2]\n: 3", "f:1: a list or mapping as a key"),
        (b"a: " + b"9" * 5000, "f:1: a number of 5000 digits"),
        (b"a: 1e999", "beyond any finite number"),
        (b"a: " + b"[" * 50, "nested deeper than 32"),
        (b'a: "\\ud83d"', "half a surrogate pair"),
        (b"a:\n\t- 1", "not well-formed"),
    ],
)
def test_refuses_in_one_line(content, message):
    with pytest.raises(InputError) as error:
        parse(content, "f")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_large_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(InputError, match=r"large\.yaml: 100,000,000 bytes; allowed: at most 262,144 bytes"):
        read(path)
    assert MAX_BYTES == 262_144


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, message in {"absent.yaml": "does not exist", ".": "is a folder", "pipe": "is a device or a pipe"}.items():
        with pytest.raises(InputError, match=message):
            read(tmp_path / name)
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(InputError, match=r"cannot be read|does not exist"):
            read(tmp_path / name)


def test_values_of_the_command_line():
    assert parse_value("5e8", "--set") == 5e8
    assert parse_value("[1, 2]", "--set") == [1, 2]
    assert parse_value("", "--set") is None
    with pytest.raises(InputError, match=r"^--set"):
        parse_value("{a", "--set")


def test_json_with_comments_in_lines_of_their_own():
    assert parse(b'// one\n{\n\t// two\n\t"a": "http://b" }', "x.json", json=True).data == {"a": "http://b"}


def test_json_writes_some_characters_in_two_halves():
    assert parse(b'{"a": "\\ud83e\\udd9c!"}', "x.json", json=True).data == {"a": "\U0001f99c!"}
    with pytest.raises(InputError, match="half a surrogate pair"):
        parse(b'{"a": "\\ud83e!"}', "x.json", json=True)


def test_nearest_names_few_of_many():
    message = nearest("zzz", [f"a{i:03}" for i in range(100)])
    assert message.endswith("a019 and 80 more")
    assert nearest("x" * 100_000, ["a"]) == "allowed: a"


def test_nearest_names_the_close_one_or_all():
    assert nearest("stge", ["stage", "overlap_comm"]) == "did you mean 'stage'?"
    assert nearest("zzz", ["b", "a"]) == "allowed: a, b"
