"""Rank 0's machine is reached or named as unreachable in bounded time, and gloo is told the way to the others."""

import socket
from contextlib import contextmanager

import pytest

from tunebook.system import network
from tunebook.system.network import check_reached, find_interface, name_interface


def launched(address, port=29500, rank=2, size=4, local=2, **more):
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": local, "MASTER_PORT": port}
    return {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": address} | more


@contextmanager
def listening():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(network, "REACH_SECONDS", 0.2)
    monkeypatch.setattr(network, "PAUSE_SECONDS", 0.05)


def only_problem(environ):
    [problem] = check_reached(environ)
    return problem.render()


def test_a_name_that_is_not_known(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    line = only_problem(launched("node-0"))
    assert line.startswith("launch: rank 0's machine is not reached at node-0:29500 from ")
    assert "the name is not known here: Name or service not known" in line
    assert "--master_addr of torchrun, --main_process_ip of accelerate" in line


@pytest.mark.parametrize("reason", ["No route to host", "timed out"])
def test_a_machine_that_does_not_answer(monkeypatch, reason):
    def fail(*_, **__):
        raise TimeoutError(reason) if reason == "timed out" else OSError(113, reason)

    monkeypatch.setattr(socket, "create_connection", fail)
    assert f"not reached at 10.9.9.9:29500 from {socket.gethostname()} ({reason})" in only_problem(launched("10.9.9.9"))


def test_the_loopback_leads_to_no_other_machine():
    with listening() as port:
        assert check_reached(launched("127.0.0.1", port)) == []
    line = only_problem(launched("127.0.0.1", port))
    assert "127.0.0.1 is this machine itself, and nothing listens there" in line
    # Rank 0 has not begun to listen when it looks.
    assert check_reached(launched("127.0.0.1", port, rank=1)) == []


def test_a_machine_that_refuses_is_there(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert check_reached(launched("10.9.9.9")) == []


def test_one_machine_asks_nobody(monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("asked"))
    for environ in ({}, launched("nowhere", size=2), launched("nowhere") | {"LOCAL_WORLD_SIZE": ""}):
        before = dict(environ)
        assert check_reached(environ) == []
        name_interface(environ)
        assert environ == before


def test_an_interface_that_is_not_there():
    with listening() as port:
        line = only_problem(launched("127.0.0.1", port, GLOO_SOCKET_IFNAME="ib7"))
        assert line.startswith("GLOO_SOCKET_IFNAME: no interface is called 'ib7' on ")
        assert "Use one of lo" in line
        assert check_reached(launched("127.0.0.1", port, GLOO_SOCKET_IFNAME="lo")) == []


def test_gloo_is_told_the_interface_unless_the_user_said_it():
    assert find_interface("127.0.0.1") == "lo"
    environ = launched("127.0.0.1")
    name_interface(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"
    environ = launched("127.0.0.1", GLOO_SOCKET_IFNAME="eth7")
    name_interface(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_name_of_its_own_that_stands_for_the_loopback(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", 0))])
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(network, "_addresses", {"lo": ["127.0.0.1", "127.0.1.1"], "eth0": ["10.0.0.1"]}.get)
    environ = launched("node-0")
    name_interface(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "eth0"
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    environ = launched("node-0")
    name_interface(environ)
    assert "GLOO_SOCKET_IFNAME" not in environ
