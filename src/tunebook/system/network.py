"""The network between machines: whether rank 0's machine is reached, and which interface leads to it."""

import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from tunebook.errors import Problem

# A machine that is only just starting, or a name that is only just announced, is waited for.
REACH_SECONDS = 60.0
ATTEMPT_SECONDS = 5.0
PAUSE_SECONDS = 1.0
SIOCGIFADDR = 0x8915
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def check_reached(environ: Mapping[str, str]) -> list[Problem]:
    """Return why rank 0's machine is not reached from here, within about `REACH_SECONDS`; nothing on one machine.

    A machine on which nothing listens yet is reached: rank 0 may still prepare its data.
    """
    if not _is_one_of_several(environ):
        return []
    found = _check_interface(environ[GLOO_INTERFACE]) if environ.get(GLOO_INTERFACE) else []
    ip, reason = _reach(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_main=_is_on_main_machine(environ))
    if ip is None:
        address = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        fix = (
            "Give the address of the machine with rank 0 as the others see it, and open the port: --master_addr of "
            "torchrun, --main_process_ip of accelerate, MASTER_ADDR elsewhere"
        )
        message = f"rank 0's machine is not reached at {address} from {socket.gethostname()} ({reason})"
        found.append(Problem(message, fix, where="launch"))
    return found


def name_interface(environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell gloo by which interface the other machines are reached, unless GLOO_SOCKET_IFNAME says so.

    gloo takes the one that the machine's own name stands for, which is the loopback on many systems, and then no group
    forms over several machines. Does nothing on one.
    """
    if environ.get(GLOO_INTERFACE) or not _is_one_of_several(environ):
        return
    try:
        ip = str(socket.getaddrinfo(environ["MASTER_ADDR"], None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return
    interface = find_interface(ip)
    is_by_name = environ["MASTER_ADDR"] not in ("localhost", ip)
    if interface is not None and ip_address(ip).is_loopback and is_by_name:
        # This machine's own name, which stands for 127.0.1.1 on Debian; the others come by another interface.
        outward = [name for _, name in socket.if_nameindex() if _addresses(name) and name != interface]
        interface = outward[0] if len(outward) == 1 else None
    if interface is not None:
        environ[GLOO_INTERFACE] = interface


def find_interface(address: str) -> str | None:
    """Return the interface whose own address is used to reach `address` (an IP), or None where that is not known.

    For an address of this machine it is the interface that has it: the one other machines come by.
    """
    own = _own_address(address)
    for _, name in socket.if_nameindex():
        if own is not None and own in _addresses(name):
            return name
    return None


def _is_one_of_several(environ: Mapping[str, str]) -> bool:
    size, local = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE", "")
    return local.isdecimal() and size.isdecimal() and int(size) > int(local) >= 1


def _is_on_main_machine(environ: Mapping[str, str]) -> bool:
    return int(environ["RANK"]) < int(environ["LOCAL_WORLD_SIZE"])


def _reach(address: str, port: int, is_main: bool) -> tuple[str | None, str]:
    """Return the IP that answers at an address, or refuses the connection; else None and why not."""
    began, reason = time.monotonic(), ""
    while True:
        try:
            for *_, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
                ip = str(place[0])
                reason = _try(ip, port, may_refuse=is_main or not ip_address(ip).is_loopback)
                if not reason:
                    return ip, ""
        except (OSError, UnicodeError) as error:
            reason = f"the name is not known here: {_words(error)}"
        if time.monotonic() - began > REACH_SECONDS:
            return None, reason
        time.sleep(PAUSE_SECONDS)


def _try(ip: str, port: int, may_refuse: bool) -> str:
    """Return why a machine is not reached, "" where it is. At a loopback address nobody else will begin to listen."""
    try:
        with socket.create_connection((ip, port), timeout=ATTEMPT_SECONDS):
            return ""
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            return "" if may_refuse else f"{ip} is this machine itself, and nothing listens there"
        return _words(error)


def _words(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error)
    return said if isinstance(said, str) and said else type(error).__name__


def _check_interface(names: str) -> list[Problem]:
    """Refuse a name that no interface has; gloo takes several, with a comma between."""
    known = [name for _, name in socket.if_nameindex()]
    unknown = [name for name in names.split(",") if name.strip() not in known]
    if not unknown:
        return []
    message = f"no interface is called {unknown[0]!r} on {socket.gethostname()}"
    fix = f"Use one of {', '.join(known)}, or leave it unset: the one that leads to MASTER_ADDR is found"
    return [Problem(message, fix, GLOO_INTERFACE)]


def _own_address(address: str) -> str | None:
    family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: it only asks for the route
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _addresses(interface: str) -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        with suppress(OSError):  # no IPv4 address
            found.append(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24]))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, *_, name = line.split()
        if name == interface:
            found.append(str(ip_address(bytes.fromhex(digits))))
    return found
