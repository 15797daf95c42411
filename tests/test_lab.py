"""The lab: it stands, carries and counts, and nothing of it stays whatever ends its owner."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from reference.lab import LabPlan, down, lab, network, registry, unsupported, up
from reference.launching.iproute import LabError, command
from zsim.units import InputError

ROOT = Path(__file__).parents[1]
REASON = unsupported()
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=f"no lab on this machine: {REASON}")

OWNER = """
import subprocess, sys, time
from reference.launching.iproute import LabError, command
from reference.lab import LabPlan, lab
with lab(LabPlan(name=sys.argv[1])) as standing:
    prefix = standing.nodes[0].prefix
    subprocess.Popen([*prefix, "sleep", "600"], start_new_session=True)
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def plan():
    """A lab that no other test has."""
    plan = LabPlan(name=f"test{os.getpid()}")
    yield plan
    assert not network.standing(plan.namespaces)
    assert not (registry.FOLDER / f"{plan.name}.json").exists()


@pytest.fixture
def owner(plan):
    """Another process that has the lab."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, plan.name], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with process:
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()
    down(plan.name)


def namespaces():
    """All of this machine, by iproute2's own word."""
    return {line.split()[0] for line in command("ip", "netns", "list").splitlines()}


def own_interfaces():
    """Of the machine itself, with what they are set to."""
    return json.loads(command("ip", "-j", "link", "show"))


@needs_namespaces
def test_a_lab_stands_and_goes(plan):
    before = namespaces(), own_interfaces()
    with lab(plan) as standing:
        assert namespaces() - before[0] >= set(plan.namespaces)
        assert own_interfaces() == before[1]
        assert [node.address for node in standing.nodes] == ["10.0.0.1", "10.0.0.2"]
        assert standing.congestion_control in {"cubic", "bbr", "reno"}
    assert not namespaces() & set(plan.namespaces)
    assert own_interfaces() == before[1]


@needs_namespaces
def test_counters_are_what_has_crossed_the_link(plan):
    """A megabyte at 100 Mbit/s: 84 ms, less the 128 KiB that the bucket lets through at once."""
    num_bytes, rate_bytes_per_s = 1_000_000, 12.5e6
    with lab(replace(plan, rate_bytes_per_s=rate_bytes_per_s)) as standing:
        (sender, receiver), before = standing.nodes, standing.counters()
        serve = (
            "import socket; s = socket.create_server(('10.0.0.2', 5000)); print('up', flush=True); c, _ = s.accept()\n"
            "while c.recv(65536): pass"
        )
        send = (
            "import socket, time; begin = time.perf_counter(); c = socket.create_connection(('10.0.0.2', 5000), 10)\n"
            f"c.sendall(bytes({num_bytes})); c.shutdown(socket.SHUT_WR); c.recv(1); print(time.perf_counter() - begin)"
        )
        with subprocess.Popen([*receiver.prefix, sys.executable, "-c", serve], stdout=subprocess.PIPE) as server:
            server.stdout.readline()
            taken = subprocess.run([*sender.prefix, sys.executable, "-c", send], capture_output=True, check=True)
        sent, received = (after - earlier for after, earlier in zip(standing.counters(), before, strict=True))
    # An ARP packet is shorter than the headers that it is taken for, a SYN longer.
    assert sent.sent_payload_bytes == pytest.approx(num_bytes, rel=1e-4)
    assert num_bytes < sent.sent_bytes <= 1.02 * num_bytes
    assert received.received_bytes == sent.sent_bytes
    assert received.sent_bytes == sent.received_bytes
    assert float(taken.stdout) >= (num_bytes - plan.burst_bytes) / rate_bytes_per_s


@needs_namespaces
def test_a_living_owner_is_not_disturbed(plan, owner):
    with pytest.raises(InputError, match=f"lab {plan.name} is in use by process {owner.pid}"), lab(plan):
        pass
    with pytest.raises(InputError, match=f"in use by process {owner.pid}"):
        down(plan.name)
    assert namespaces() >= set(plan.namespaces)


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lab_without_owner_is_found_and_removed(plan, owner, number):
    """Python does not unwind at a bare SIGTERM either."""
    os.kill(owner.pid, number)
    owner.wait()
    left = command("ip", "netns", "pids", plan.node_namespaces[0]).split()
    assert len(left) == 1
    with lab(plan):
        assert namespaces() >= set(plan.namespaces)
        assert not command("ip", "netns", "pids", plan.node_namespaces[0])
    assert not registry.start_ticks(int(left[0]))


@needs_namespaces
def test_a_stale_lab_of_another_name_goes_too(plan, owner):
    owner.kill()
    owner.wait()
    with lab(replace(plan, name=f"more{os.getpid()}")):
        assert not namespaces() & set(plan.namespaces)


@needs_namespaces
def test_an_error_inside_takes_the_lab_down(plan):
    with pytest.raises(ZeroDivisionError), lab(plan):
        raise ZeroDivisionError
    assert not namespaces() & set(plan.namespaces)


@needs_namespaces
def test_a_lab_that_cannot_be_built_leaves_nothing(plan, monkeypatch):
    def broken(*_arguments):
        raise LabError("tc: planted")

    monkeypatch.setattr(network, "_connect", broken)
    with pytest.raises(LabError, match="planted"), lab(plan):
        pass
    assert not namespaces() & set(plan.namespaces)


@needs_namespaces
def test_up_is_used_and_left_standing(plan):
    up(plan)
    with lab(plan):
        pass
    assert namespaces() >= set(plan.namespaces)
    with pytest.raises(InputError, match=r"kept with 2 nodes .* zsim lab down removes it"), lab(replace(plan, nodes=3)):
        pass
    assert down(plan.name)
    assert not down(plan.name)


@needs_namespaces
def test_a_namespace_that_is_not_ours_is_left_alone(plan):
    command("ip", "netns", "add", plan.switch_namespace)
    try:
        with pytest.raises(InputError, match="belongs to no lab"), lab(plan):
            pass
        assert plan.switch_namespace in namespaces()
    finally:
        command("ip", "netns", "delete", plan.switch_namespace)


@needs_namespaces
def test_a_record_of_another_boot_touches_nothing(plan):
    command("ip", "netns", "add", plan.switch_namespace)
    with registry.locked():
        registry.write(registry.Record(plan, os.getpid(), 1, "another boot", kept=False))
        assert plan.name in registry.remove_stale()
    assert plan.switch_namespace in namespaces()
    command("ip", "netns", "delete", plan.switch_namespace)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nodes": 0}, "nodes: 0; allowed: 1 to 64"),
        ({"name": "../x"}, "allowed: 1 to 16 small letters and digits"),
        ({"rate_bytes_per_s": float("nan")}, "rate in bytes/s: nan"),
        ({"mtu_bytes": 100_000}, "MTU in bytes"),
        ({"burst_bytes": 1500}, "burst in bytes: 1500; allowed: 9014"),
        ({"nodes": 64, "ranks_per_node": 64}, "4096 ranks on one machine"),
        ({"congestion_control": "-x"}, "congestion control"),
    ],
)
def test_plans_that_cannot_be(given, said):
    with pytest.raises(InputError, match=said):
        LabPlan(**given)


def test_a_machine_that_cannot_says_why(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert unsupported() == "network namespaces need root"
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert unsupported() == "ip and tc of iproute2 not found"


def test_a_zombie_owns_nothing():
    process = subprocess.Popen(["true"])
    deadline_s = time.monotonic() + 10
    while registry.start_ticks(process.pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not registry.start_ticks(process.pid)
    process.wait()
    assert registry.start_ticks(os.getpid())
