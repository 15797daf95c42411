"""What may go wrong, by who has to act: the user (exit code 2) or this project (exit code 1)."""

EXIT_OK = 0
EXIT_OWN_CHECK = 1
EXIT_INPUT = 2
EXIT_INTERRUPTED = 130


class OwnCheckError(RuntimeError):
    """A check of zsim's own failed: the fault is ours, and no number is better than a wrong one."""


class ImpossibleResultError(OwnCheckError):
    """A result that no machine can produce: negative, not a number, or above the hardware's peak."""


class RunFailedError(RuntimeError):
    """A measured run ended before its end: a rank died, hung, or the ranks did not meet; exit code 1."""


class InterruptedWorkError(Exception):
    """Ctrl-C during work of which a part is kept; the message says which and how to go on."""
