"""State of a network interface according to the kernel: either read on request, or reported by a notification of changes
(netlink, see rtnetlink(7))."""

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that select the interface by which ranks communicate."""

_GET_FLAGS, _SET_FLAGS, _UP, _RUNNING = 0x8913, 0x8914, 0x1, 0x40
_REQUEST = struct.Struct("16sh14x")  # struct ifreq: name, flags
_HEADER, _LINK = struct.Struct("=IHHII"), struct.Struct("=BxHiII")  # struct nlmsghdr, struct ifinfomsg
_NEW_LINK, _DELETED_LINK, _LINK_NEWS = 16, 17, 1
_ROUTE = 0  # NETLINK_ROUTE


def named(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the network interface that is set for the ranks' communication. Return None if no interface is set, or if the value
    is not the name of one existing interface."""
    name = next((environment[variable] for variable in NAMES if environment.get(variable)), "")
    return name if name in {known for _, known in socket.if_nameindex()} else None


def flags(name: str) -> int:
    """Return the kernel's flags of an interface. Raises OSError if the interface does not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return _REQUEST.unpack(fcntl.ioctl(asking, _GET_FLAGS, _REQUEST.pack(name.encode(), 0)))[1] & 0xFFFF


def is_up(name: str) -> bool:
    """True if an interface exists, is up, and has a carrier."""
    try:
        return _runs(flags(name))
    except OSError:
        return False


def loopback() -> str | None:
    """Return the name of the loopback interface; None if it is not up."""
    return next((name for name in ("lo", "lo0") if is_up(name)), None)


def take_down(name: str) -> None:
    """Switch an interface off. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, _SET_FLAGS, _REQUEST.pack(name.encode(), flags(name) & ~_UP))


def watch(name: str, down: Callable[[], None]) -> None:
    """Call `down` from a thread once an interface of the caller's current network namespace goes down; at once if the interface
    is down already."""
    news = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _ROUTE)
    news.bind((0, _LINK_NEWS))
    index = socket.if_nametoindex(name)

    def listen() -> None:
        with news:
            while not _is_down(news.recv(1 << 16), index):
                pass
        down()

    if is_up(name):
        threading.Thread(target=listen, name=f"link-{name}", daemon=True).start()
    else:
        news.close()
        down()


def _is_down(message: bytes, index: int) -> bool:
    at = 0
    while at + _HEADER.size + _LINK.size <= len(message):
        length, kind, *_ = _HEADER.unpack_from(message, at)
        _, _, which, state, _ = _LINK.unpack_from(message, at + _HEADER.size)
        if which == index and (kind == _DELETED_LINK or (kind == _NEW_LINK and not _runs(state))):
            return True
        at += max(_HEADER.size, (length + 3) & ~3)
    return False


def _runs(state: int) -> bool:
    return bool(state & _UP) and bool(state & _RUNNING)
