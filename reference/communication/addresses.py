"""The address that other ranks reach this one at, by gloo's own rules."""

import fcntl
import os
import socket
import struct
from typing import Final

from reference.communication.communicator import CommunicationError

_SIOCGIFADDR: Final = 0x8915
"""ioctl of Linux: the IPv4 address of an interface (linux/sockios.h)."""


def own_address() -> str:
    """IPv4 address of GLOO_SOCKET_IFNAME, or the one from which MASTER_ADDR is reached, or the host name's.

    Raises:
        CommunicationError: no such interface, or it has no address.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface:
        return _address_of(interface)
    master = os.environ.get("MASTER_ADDR")
    try:
        if not master:
            return socket.gethostbyname(socket.gethostname())
        # Connecting UDP sends nothing; it asks the kernel for the route.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 1))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CommunicationError(
            f"no address of this host reaches {master or 'itself'} ({error}); GLOO_SOCKET_IFNAME names the interface"
        ) from error


def _address_of(interface: str) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
    except OSError as error:
        there = ", ".join(name for _, name in socket.if_nameindex())
        raise CommunicationError(
            f"GLOO_SOCKET_IFNAME: no interface {interface!r} with an IPv4 address ({error.strerror}); there are {there}"
        ) from error
    return socket.inet_ntoa(answer[20:24])
