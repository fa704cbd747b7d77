"""Whether this process still sends or reads, for what does so in threads that tell nothing: hf_xet."""

import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

# More than a request that is only tried again sends, and than looking at these counters reads.
SENT_BYTES, READ_BYTES = 2**16, 2**24
TCP_INFO_ACKED = 120  # where struct tcp_info of Linux has tcpi_bytes_acked, and behind it tcpi_bytes_received


class Traffic:
    """The bytes that went over this process's connections, and those that it read from files."""

    def __init__(self) -> None:
        self._sent, self._read = bytes_by_connection(), read_bytes()

    def moved(self) -> bool:
        """Return whether more than a little has moved since it was last said to have."""
        sent, read = bytes_by_connection(), read_bytes()
        gained = sum(number - self._sent.get(connection, 0) for connection, number in sent.items())
        if gained < SENT_BYTES and read - self._read < READ_BYTES:
            return False
        self._sent, self._read = sent, read
        return True


def bytes_by_connection() -> dict[int, int]:
    """Return the bytes that went to and fro over each TCP connection of this process, by its inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        with suppress(OSError, ValueError, struct.error):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_ACKED + 16)
                        found[status.st_ino] = sum(struct.unpack_from("QQ", told, TCP_INFO_ACKED))
    return found


def read_bytes() -> int:
    """Return the bytes that this process has read; 0 where the system does not tell."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])
    return 0
