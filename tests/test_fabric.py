"""Links are shared max-min fairly, and a flow alone takes exactly as long as it was priced."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.engine.fabric import Clock, Fabric, max_min_speeds

LINKS = ("a", "b", "c", "d")
CLOSE = 1e-6


@st.composite
def networks(draw):
    """Capacities and flows none of which is hindered by a link when alone."""
    capacities = {link: draw(st.floats(1.0, 1e3)) for link in LINKS}
    flows = []
    for _ in range(draw(st.integers(1, 12))):
        links = draw(st.lists(st.sampled_from(LINKS), min_size=1, unique=True))
        flows.append(tuple((link, capacities[link] * draw(st.floats(1e-3, 1.0))) for link in links))
    return capacities, flows


def bandwidths(flows, speeds):
    """What each flow moves over its busiest link."""
    return [speed * max(demand for _, demand in flow) for flow, speed in zip(flows, speeds, strict=True)]


def loads(capacities, flows, speeds):
    total = dict.fromkeys(capacities, 0.0)
    for flow, speed in zip(flows, speeds, strict=True):
        for link, demand in flow:
            total[link] += demand * speed
    return total


@given(networks())
def test_shares_are_feasible_and_max_min_fair(network):
    """Feasible, and each flow is at full speed or crosses a full link on which no flow gets more than it."""
    capacities, flows = network
    speeds = max_min_speeds(flows, capacities)
    rates = bandwidths(flows, speeds)
    total = loads(capacities, flows, speeds)
    assert all(total[link] <= capacities[link] * (1 + CLOSE) for link in capacities)
    for index, flow in enumerate(flows):
        assert 0.0 < speeds[index] <= 1.0
        bottlenecks = [
            link
            for link, _ in flow
            if total[link] >= capacities[link] * (1 - CLOSE)
            and all(
                rates[other] <= rates[index] * (1 + CLOSE)
                for other, neighbour in enumerate(flows)
                if link in dict(neighbour)
            )
        ]
        assert speeds[index] >= 1 - CLOSE or bottlenecks


@given(networks(), st.randoms())
def test_shares_do_not_depend_on_the_order_of_flows(network, random):
    capacities, flows = network
    order = list(range(len(flows)))
    random.shuffle(order)
    speeds = max_min_speeds(flows, capacities)
    shuffled = max_min_speeds([flows[index] for index in order], capacities)
    assert [speeds[index] for index in order] == pytest.approx(shuffled)


def test_fairness_is_by_bandwidth_not_by_fraction():
    """A flow of 20 keeps 20 of 50; one of 40 gets the other 30."""
    assert max_min_speeds([(("nic", 40.0),), (("nic", 20.0),)], {"nic": 50.0}) == pytest.approx([0.75, 1.0])


def run_flows(capacities, flows):
    """Starts flows (start, demands, seconds alone) and returns when each ends."""
    clock = Clock()
    fabric = Fabric(clock, capacities)
    ends = {}

    def starter(name, start_s, demands, alone_s):
        yield clock.timeout(start_s)
        fabric.start(clock.now, demands, alone_s, lambda now: ends.__setitem__(name, now))

    for name, flow in enumerate(flows):
        clock.process(starter(name, *flow))
    clock.drain()
    return [ends[name] for name in range(len(flows))]


@given(networks(), st.floats(1e-6, 1e3))
def test_a_flow_alone_takes_as_long_as_priced(network, alone_s):
    capacities, flows = network
    assert run_flows(capacities, [(0.5, flows[0], alone_s)]) == [0.5 + alone_s]


def test_two_flows_share_while_both_run():
    """Both need the whole link: 1 s alone, half speed for 1 s, then the later one goes on alone."""
    flow = (("nic", 10.0),)
    assert run_flows({"nic": 10.0}, [(0.0, flow, 1.5), (1.0, flow, 2.0)]) == pytest.approx([2.0, 3.5])


def test_flows_on_different_links_do_not_meet():
    assert run_flows({"a": 1.0, "b": 1.0}, [(0.0, (("a", 1.0),), 2.0), (0.0, (("b", 1.0),), 3.0)]) == [2.0, 3.0]


def test_an_end_frees_flows_on_all_its_links():
    """The middle flow joins two links; at its end both neighbours speed up."""
    flows = [(0.0, (("a", 1.0),), 2.0), (0.0, (("a", 1.0), ("b", 1.0)), 0.5), (0.0, (("b", 1.0),), 3.0)]
    assert run_flows({"a": 1.0, "b": 1.0}, flows) == pytest.approx([2.5, 1.0, 3.5])


@settings(max_examples=30, deadline=None)
@given(networks(), st.data())
def test_the_work_of_all_flows_is_conserved(network, data):
    """No flow ends before its time alone has passed, and links never carry more than they can."""
    capacities, demands = network
    flows = [(data.draw(st.floats(0.0, 2.0)), flow, data.draw(st.floats(0.01, 2.0))) for flow in demands]
    ends = run_flows(capacities, flows)
    for (start_s, _, alone_s), end_s in zip(flows, ends, strict=True):
        assert end_s >= (start_s + alone_s) * (1 - CLOSE)
    for link, capacity in capacities.items():
        moved = sum(alone_s * dict(flow).get(link, 0.0) for _, flow, alone_s in flows)
        window_s = max(ends) - min(start_s for start_s, _, _ in flows)
        assert moved <= capacity * window_s * (1 + CLOSE)


def test_many_flows_stay_cheap():
    """128 flows at a time over 32 links: the naive loop over all pairs took 104 ms a transfer; 10 ms is the limit."""
    capacities = {f"nic{index}": 25e9 for index in range(32)}
    flows = [
        (index * 1e-5, tuple((f"nic{(index * 7 + hop) % 32}", 20e9 - index * 1e7) for hop in range(4)), 1e-2)
        for index in range(128)
    ]
    begin = time.perf_counter()
    run_flows(capacities, flows)
    assert (time.perf_counter() - begin) / len(flows) < 10e-3
