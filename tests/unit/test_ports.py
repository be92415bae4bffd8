"""Ports of the servers of tests."""

import socket
from itertools import combinations

from tests.support.ports import END, FIRST, FOLLOWING, RANGES, free_addresses, free_port, ports_of


def test_no_two_workers_draw_the_same_port() -> None:
    ranges = [ports_of(worker) for worker in ("", *(f"gw{number}" for number in range(RANGES - 1)))]
    for one, other in combinations(ranges, 2):
        assert set(one).isdisjoint(range(other.start, other.stop + FOLLOWING))
    assert min(map(min, ranges)) == FIRST
    assert max(map(max, ranges)) + FOLLOWING < END


def test_more_workers_than_ranges_share_them() -> None:
    assert ports_of(f"gw{RANGES}") == ports_of("gw1")


def test_a_port_is_given_once_and_is_free() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    for port in ports:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_servers_with_several_ports_do_not_meet() -> None:
    for _ in range(20):
        ports = sorted(int(address.rpartition(":")[2]) for address in free_addresses(3))
        assert min(ports[1] - ports[0], ports[2] - ports[1]) > FOLLOWING
