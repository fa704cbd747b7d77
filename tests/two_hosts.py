"""Two machines on one: network namespaces joined by a cable that can be cut."""

import os
import shutil
import subprocess

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")


class TwoHosts:
    """Two namespaces with a loopback each and a veth pair between them; `names` are those `ip netns` knows."""

    def __init__(self):
        self.names = tuple(f"tunebook{os.getpid()}{letter}" for letter in "ab")
        self._cables = tuple(f"tb{os.getpid()}{letter}" for letter in "ab")
        if shutil.which("ip") is None:
            pytest.skip("no network namespaces: the command ip is not installed")
        try:
            self._build()
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"no network namespaces can be made here: {error.stderr.strip()}")

    def _build(self):
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        one, other = self._cables
        ip("link", "add", one, "netns", self.names[0], "type", "veth", "peer", "name", other, "netns", self.names[1])
        for name, cable, address in zip(self.names, self._cables, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")

    def cut(self):
        ip("-n", self.names[1], "link", "set", self._cables[1], "down")

    def mend(self):
        ip("-n", self.names[1], "link", "set", self._cables[1], "up")

    def command(self, host, *words):
        """Return the words that run a command on host 0 or 1."""
        return ["ip", "netns", "exec", self.names[host], *map(str, words)]

    def close(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def ip(*words):
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
