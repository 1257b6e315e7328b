"""The address of rank 0's store; tests/distributed has what needs an mpirun."""

import socket

import pytest

from zerofp4.launch import mpi


def no_route(*_):
    raise OSError("network is unreachable")


def test_address_for_other_hosts(monkeypatch):
    def resolves_to(*addresses):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)

    monkeypatch.delenv("MASTER_ADDR", raising=False)
    resolves_to("127.0.1.1", "192.0.2.7")
    assert mpi.reachable_address() == "192.0.2.7"
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert mpi.reachable_address() == "node0"


def test_no_address_for_other_hosts(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", no_route)
    monkeypatch.setattr(socket, "socket", no_route)
    with pytest.raises(RuntimeError, match=r"no address for other hosts .*unreachable.*MASTER_ADDR"):
        mpi.reachable_address()
