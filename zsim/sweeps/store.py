"""One SQLite file that holds the finished rows of a sweep, whatever ends the process.

A row is one transaction under SQLite's rollback journal, so the one file is complete after each of them. Room for all
rows is taken on disk before the work begins.
"""

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from zsim.reading.documents import InputError
from zsim.sweeps.grid import canonical

SCHEMA: Final = "zsim-sweep/1"
_APPLICATION_ID: Final = 0x7A73696D
""""zsim", in SQLite's header."""
_BYTES_OF_A_ROW: Final = 8 * 1024
"""Taken on disk beforehand; a row's metrics take about five kilobytes."""
_PATIENCE_S: Final = 30.0
_MOST_CHANGES: Final = 3
"""Changes named in a message,"""
_LONGEST_VALUE: Final = 60
"""and characters of each."""
_TABLES: Final = """
create table meta (name text primary key, value text not null) without rowid;
create table rows (
    key text primary key, assignments text not null, status text not null, reason text not null, metrics text
) without rowid;
"""

_FACTS: Final = {"identity": dict, "axes": dict, "files": dict, "question": str}
"""What `meta` holds."""

Status = Literal["done", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a row: its metrics, or why there are none."""

    status: Status
    """"done"; "refused": the experiment is impossible; "failed": a check of zsim's own."""
    reason: str = ""
    metrics: dict[str, Any] | None = None
    """The document of `zsim run --json`."""


class Store:
    """An open file of results; `path` None keeps them in memory alone."""

    def __init__(self, connection: sqlite3.Connection, path: Path | None) -> None:
        self._connection = connection
        self.path = path

    def close(self) -> None:
        """Ends it; nothing is pending at any time."""
        self._connection.close()

    def put(self, key: str, assignments: Mapping[str, Any], outcome: Outcome) -> None:
        """Keeps a row, for good when this returns."""
        metrics = None if outcome.metrics is None else json.dumps(outcome.metrics, allow_nan=False)
        row = (key, json.dumps(assignments), outcome.status, outcome.reason, metrics)
        with _said(self.path, "; the rows before it are kept"), self._connection:
            self._connection.execute("insert or ignore into rows values (?, ?, ?, ?, ?)", row)

    def keys(self) -> set[str]:
        """Of the rows that are there."""
        with _said(self.path):
            if not _is_ours(self._connection):
                return set()
            return {key for (key,) in self._connection.execute("select key from rows")}

    def outcomes(self) -> dict[str, Outcome]:
        """Key -> row, of all rows."""
        with _said(self.path):
            found = self._connection.execute("select key, status, reason, metrics from rows").fetchall()
        return {key: self._outcome(key, status, reason, metrics) for key, status, reason, metrics in found}

    def _outcome(self, key: Any, status: Any, reason: Any, metrics: Any) -> Outcome:
        document = None if metrics is None else self._json(metrics, f"row {key}")
        is_whole = document is None if status != "done" else isinstance(document, dict) and "step_time_s" in document
        if status not in get_args(Status) or not isinstance(reason, str) or not is_whole:
            raise self._damaged(f"row {key}")
        return Outcome(status, reason, document)

    def _json(self, text: Any, what: str) -> Any:
        try:
            return json.loads(text)
        except (TypeError, ValueError):
            raise self._damaged(what) from None

    def _damaged(self, what: str) -> InputError:
        return InputError(f"{self.path or 'sweep'}: is damaged ({what}); allowed: a file as zsim sweep left it")

    def meta(self, name: str) -> Any:
        """A fact about the sweep; None before it has begun."""
        with _said(self.path):
            if not _is_ours(self._connection):
                return None
            found = dict(self._connection.execute("select name, value from meta"))
        if not found:
            return None
        value = self._json(found.get(name), name)
        if not isinstance(value, _FACTS[name]) or (
            name == "axes" and not all(isinstance(v, list) for v in value.values())
        ):
            raise self._damaged(name)
        return value

    def begin(self, facts: Mapping[str, Any], num_rows: int) -> None:
        """States what the sweep is, and takes room on disk for so many further rows."""
        with _said(self.path):
            if not _is_ours(self._connection):
                self._connection.execute(f"pragma application_id = {_APPLICATION_ID}")
                self._connection.executescript(f"begin;{_TABLES}commit;")
            with self._connection:
                texts = [(name, json.dumps(value)) for name, value in facts.items()]
                self._connection.executemany("insert or replace into meta values (?, ?)", texts)
            if self.path is not None and num_rows:
                self._reserve(num_rows * _BYTES_OF_A_ROW)

    def _reserve(self, nbytes: int) -> None:
        """Grows the file by pages that later rows fill."""
        # What a killed process may have left of the same.
        self._connection.execute("drop table if exists room")
        (free,) = self._connection.execute("pragma freelist_count").fetchone()
        (page_bytes,) = self._connection.execute("pragma page_size").fetchone()
        if (missing := nbytes - free * page_bytes) > 0:
            with self._connection:
                self._connection.execute("create table room (filling blob)")
                self._connection.execute("insert into room values (zeroblob(?))", (missing,))
            with self._connection:
                self._connection.execute("drop table room")


def in_memory() -> Store:
    """Results that end with the process."""
    return Store(_connect(":memory:"), None)


def created(path: Path, facts: Mapping[str, Any], num_rows: int) -> Store:
    """A new file with room for its rows; it vanishes if it cannot be prepared.

    Raises:
        InputError: there is one already, or nothing can be written there.

    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        allowed = "the path of a file" if path.is_dir() else "--resume to go on with it, or another path"
        raise InputError(f"--out {path}: is there already; allowed: {allowed}") from None
    except OSError as error:
        raise InputError(f"--out {path}: cannot write into {path.parent}: {error.strerror}") from None
    store = None
    try:
        with _said(path):
            store = Store(_connect(str(path)), path)
        store.begin(facts, num_rows)
    except BaseException:
        if store is not None:
            store.close()
        for name in (path, path.with_name(f"{path.name}-journal")):
            name.unlink(missing_ok=True)
        raise
    return store


def opened(path: Path) -> Store:
    """A file of an earlier sweep.

    Raises:
        InputError: it is none, or cannot be read.

    """
    if not path.is_file():
        raise InputError(f"{path}: {'is a folder' if path.is_dir() else 'does not exist'}; allowed: a sweep's file")
    mode = "rw" if os.access(path, os.W_OK) else "ro"
    connection = _connect(f"{path.resolve().as_uri()}?mode={mode}")
    try:
        try:
            known = _is_ours(connection)
        except sqlite3.DatabaseError:
            known = False
        # A process killed before its first transaction leaves an empty file.
        _check_ours(path, known=known or not path.stat().st_size)
    except BaseException:
        connection.close()
        raise
    return Store(connection, path)


def _check_ours(path: Path, *, known: bool) -> None:
    if not known:
        raise InputError(f"{path}: is no file of zsim sweep; allowed: one that it wrote")


def check_same(store: Store, facts: Mapping[str, Any]) -> None:
    """Rows of two experiments are not one table.

    Args:
        store: a file that was begun.
        facts: as `begin` takes them; of "files" those that both name are compared, for new values of an axis may
            name further ones.

    Raises:
        InputError: the file belongs to another sweep; what differs is named.

    """
    begun = f"{store.path}: was begun with"
    now = json.loads(json.dumps(facts))
    if changes := _changes(store.meta("identity"), now["identity"]):
        raise InputError(f"{begun} {changes}; allowed: the same experiment, or another --out")
    if list(axes := store.meta("axes")) != list(now["axes"]):
        given = f"the axes {', '.join(axes)}, now {', '.join(now['axes'])}"
        raise InputError(f"{begun} {given}; allowed: the same axes, also with other values, or another --out")
    files = store.meta("files")
    changed = sorted(name for name, digest in now["files"].items() if files.get(name, digest) != digest)
    if changed:
        raise InputError(f"{begun} another content of {', '.join(changed)}; allowed: the same, or another --out")


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    changes = [f"{name} {_side(before, name)}, now {_side(now, name)}" for name in names[:_MOST_CHANGES]]
    more = f" and {len(names) - _MOST_CHANGES} more" if len(names) > _MOST_CHANGES else ""
    return "; ".join(changes) + more


def _side(settings: Mapping[str, Any], name: str) -> str:
    return _short(canonical(settings[name])) if name in settings else "without"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _connect(place: str) -> sqlite3.Connection:
    return sqlite3.connect(place, timeout=_PATIENCE_S, uri=place.startswith("file:"))


def _is_ours(connection: sqlite3.Connection) -> bool:
    """Whether the tables are there; they came in one transaction."""
    with closing(connection.execute("select name from sqlite_master where name in ('meta', 'rows')")) as cursor:
        return len(cursor.fetchall()) == 2


@contextmanager
def _said(path: Path | None, more: str = "") -> Iterator[None]:
    """What SQLite complains about, on one line with the file."""
    try:
        yield
    except sqlite3.Error as error:
        raise InputError(f"{path or 'sweep'}: {error}{more}") from error
