"""iproute2's `ip` and `tc` as functions, and what the token buckets of a lab have let through."""

import json
import shutil
import subprocess

INTERFACE = "eth0"
"""Of every node of a lab, so that one GLOO_SOCKET_IFNAME serves all."""
HEADERS_BYTES = 14 + 20 + 20 + 12
"""Of a TCP segment in the counters: Ethernet, IPv4, TCP, TCP's timestamps."""
COMMAND_TIMEOUT_S = 20.0


class LabError(RuntimeError):
    """This machine does not let a lab be built; the message says what failed."""


def command(tool: str, *arguments: str) -> str:
    """Runs `ip` or `tc`, out of reach of a Ctrl-C on the terminal, and returns its output.

    Raises:
        LabError: it failed, or took too long.

    """
    line = " ".join((tool, *arguments))
    try:
        done = subprocess.run(
            [shutil.which(tool) or tool, *arguments],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            start_new_session=True,
        )
    except OSError as error:
        raise LabError(f"{line}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{line}: no answer within {COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise LabError(f"{line}: {' '.join(done.stderr.split())}")
    return done.stdout


def token_buckets(namespace: str = "") -> dict[str, dict[str, int]]:
    """Statistics of the token buckets by interface, of a namespace or of the one that this process is in.

    Taken from the queues, `tc -s qdisc`: the interfaces' own counters take a packet of several segments for one.

    Raises:
        LabError: as `command`.

    """
    place = ("-n", namespace) if namespace else ()
    document = json.loads(command("tc", *place, "-j", "-s", "qdisc", "show"))
    return {queue["dev"]: queue for queue in document if queue["kind"] == "tbf"}


def payload_bytes(num_bytes: int, num_packets: int) -> int:
    """What was carried, without headers; a packet of nothing else, an acknowledgement, carries nothing."""
    return num_bytes - HEADERS_BYTES * num_packets
