"""Where the keys of an experiment were written, for messages."""

from dataclasses import dataclass

from zsim.reading.documents import Document


@dataclass(frozen=True, slots=True)
class Places:
    """Where each key of an experiment was written: its file, its DeepSpeed file, or the command line."""

    document: Document
    deepspeed: Document | None = None
    overridden: frozenset[tuple[str, ...]] = frozenset()
    axes: frozenset[tuple[str, ...]] = frozenset()
    """Those among `overridden` that an axis of a sweep sets."""

    def where(self, *keys: str) -> str:
        """For messages: file, line and key."""
        keys = self._as_written(keys)
        if any(keys[: len(path)] == path or self._made_by(path, keys) for path in self.axes):
            return f"axis {'.'.join(keys)}"
        if self._is_set(keys):
            return f"--set {'.'.join(keys)}"
        if self.deepspeed is not None and keys[:1] == ("deepspeed",):
            return self.deepspeed.where(*keys[1:])
        return self.document.where(*keys)

    def _as_written(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """With the prefix that a key of FSDP may carry, where it was written so."""
        if keys[:1] != ("fsdp",) or len(keys) < 2:
            return keys
        prefixed = ("fsdp", f"fsdp_{keys[1]}")
        is_written = prefixed in self.document.lines or any(path[:2] == prefixed for path in self.overridden)
        return (*prefixed, *keys[2:]) if is_written else keys

    def is_ours(self, *keys: str) -> bool:
        """Whether a key was written for zsim, in the experiment or by an override, and not in a DeepSpeed file."""
        return self.deepspeed is None or self._is_set(keys)

    def _is_set(self, keys: tuple[str, ...]) -> bool:
        return any(keys[: len(path)] == path or self._made_by(path, keys) for path in self.overridden)

    def _made_by(self, path: tuple[str, ...], keys: tuple[str, ...]) -> bool:
        """Whether a section exists only because an override put something into it."""
        written = keys in self.document.lines or (self.deepspeed is not None and keys[1:] in self.deepspeed.lines)
        return bool(keys) and path[: len(keys)] == keys and not written
