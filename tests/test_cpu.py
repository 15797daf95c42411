"""A cluster of CPU cores: its files, its prices, and a host that computes itself."""

import pytest
from strategy_cases import resolved

import zsim
from zsim import engine
from zsim.costs import cpu, pricer
from zsim.costs.pricing import link_capacities, products_and_all_s
from zsim.ops import COMPUTE, Attention, Collective, Compute, Copy, Gemm, HostTask, Program, Record, Sync, Wait, Work
from zsim.reading import data
from zsim.strategies import groups
from zsim.trace import INLINE
from zsim.units import InputError

EXPERIMENT = "experiments/lab_zero3.yaml"
GBIT = 1e9 / 8
MIB = 2**20


@pytest.fixture
def lab(tmp_path):
    def make(nodes=2, ranks=1, **changes):
        return resolved(tmp_path, "reference", zero={"stage": 2}, topology="lab", nodes=nodes, gpus=ranks, **changes)

    return make


def work_of(spec, op):
    return pricer(spec, groups(spec))(op)


def collective(key, kind, num_elements=16 * MIB):
    return Collective(key("reduce"), "nccl.world", kind, "world", num_elements, 4)


class TestCollectives:
    @pytest.mark.parametrize("rate", ["0.5 Gbit/s", "1 Gbit/s", "4 Gbit/s"])
    @pytest.mark.parametrize(
        ("kind", "rings", "shares"),
        [
            ("all_gather", False, (0.62, 0.60, 0.46)),
            ("reduce_scatter", False, (0.47, 0.45, 0.34)),
            ("all_reduce", False, (0.99, 0.99, 0.98)),
            ("all_gather", True, (0.99, 0.99, 0.99)),
            ("reduce_scatter", True, (0.99, 0.99, 0.96)),
        ],
    )
    def test_shares_of_the_line_rate_that_were_measured(self, key, rate, kind, rings, shares):
        """64 MiB between two namespaces: one model of wire and idle time for all three rates, to 5 %."""
        choice = f"optimisations.ring_collectives={str(rings).lower()}"
        spec = zsim.resolve(zsim.load(EXPERIMENT, [f"cluster.link_rate={rate}", choice]))
        work = work_of(spec, collective(key, kind))
        line_bytes_per_s = float(rate.split()[0]) * GBIT
        # Ring bytes over the rate; gloo's all-reduce moves its own bytes in both directions.
        alone = 64 * MIB * (1.0 if kind == "all_reduce" else 0.5) / line_bytes_per_s
        measured = shares[["0.5 Gbit/s", "1 Gbit/s", "4 Gbit/s"].index(rate)]
        assert alone / (work.alone_s - work.latency_s) == pytest.approx(measured, rel=0.05)

    def test_gloo_scatters_with_twice_the_bytes(self, lab, key):
        op = collective(key, "reduce_scatter")
        rings, gloo = (
            dict(work_of(lab(optimisations={"ring_collectives": on}), op).link_bytes) for on in (True, False)
        )
        assert rings == {"nic[0]": 32 * MIB, "nic[1]": 32 * MIB}
        assert gloo == {link: 2 * nbytes for link, nbytes in rings.items()}

    def test_a_ring_crosses_each_link_once_whatever_the_ranks_behind_it(self, lab, key):
        one, two = (dict(work_of(lab(ranks=ranks), collective(key, "all_gather")).link_bytes) for ranks in (1, 2))
        assert one["nic[0]"] == 64 * MIB / 2
        assert two["nic[0]"] == 64 * MIB * 3 / 4

    def test_within_one_node_it_goes_over_the_loopback_of_each_rank(self, lab, key):
        spec = lab(nodes=1, ranks=2)
        assert dict(work_of(spec, collective(key, "all_gather")).link_bytes) == {"loopback[0]": 2 * 32 * MIB}
        assert link_capacities(spec.cluster) == {"loopback[0]": 2 * spec.cluster.network.loopback_bytes_per_s}

    def test_latency_of_each_message(self, lab, key):
        spec = lab(nodes=4)
        message_s = spec.cluster.network.message_s
        assert work_of(spec, collective(key, "all_gather", 4)).latency_s == pytest.approx(3 * message_s)
        assert work_of(spec, collective(key, "all_reduce", 4)).latency_s == pytest.approx(6 * message_s)

    def test_it_takes_of_the_core_what_its_bytes_cost(self, lab, key):
        spec = lab()
        work = work_of(spec, collective(key, "reduce_scatter"))
        seconds_of_core = work.compute_share * (work.alone_s - work.latency_s)
        assert seconds_of_core == pytest.approx(32 * MIB / spec.runtime.stack.ring_reduce_scatter.cpu_bytes_per_s)
        assert work.sleeps

    def test_with_a_second_core_it_takes_nothing(self, key):
        spec = zsim.resolve(zsim.load(EXPERIMENT, ["cluster.cores_per_rank=2"]))
        assert work_of(spec, collective(key, "all_gather")).compute_share == 0

    def test_a_rank_alone_sends_nothing_and_copies_what_it_gathers(self, lab, key):
        spec = lab(nodes=1)
        work = work_of(spec, collective(key, "all_gather"))
        assert work.link_bytes == ()
        assert work.alone_s == pytest.approx(2 * 64 * MIB / spec.cluster.device.copy_bytes_per_s)
        assert work_of(spec, collective(key, "all_reduce")).alone_s == 0.0


class TestKernels:
    def test_products_and_bytes_and_dispatch_add_up(self, lab, key):
        spec = lab(nodes=1, precision="fp32")
        device, host = spec.cluster.device, spec.runtime.host
        op = Compute(key("dense"), (Gemm(128, 512, 512),), nbytes=MIB, num_kernels=3)
        work = work_of(spec, op)
        expected = 2 * 128 * 512 * 512 / device.fp32_gemm_flop_per_s + MIB / device.fp32_kernel_bytes_per_s
        assert products_and_all_s(op, spec)[1] == pytest.approx(expected)
        assert work.alone_s == pytest.approx(expected + 3 * host.op_forward_s)
        assert work.host_s == 0

    def test_the_optimizer_has_a_rate_of_its_own(self, lab, key):
        spec = lab(nodes=1, precision="fp32")
        work = work_of(spec, Compute(key("x", phase="step"), nbytes=MIB))
        assert work.alone_s == pytest.approx(
            MIB / spec.cluster.device.fp32_update_bytes_per_s + spec.runtime.host.op_forward_s
        )

    def test_attention_and_bf16_have_rates_of_their_own(self, lab, key):
        spec = lab(nodes=1, precision="bf16")
        device = spec.cluster.device
        attention = Attention(1024, 128, 64, 2)
        gemms_s, _ = products_and_all_s(Compute(key("x"), (Gemm(64, 64, 64), attention)), spec)
        assert gemms_s == pytest.approx(
            2 * 64**3 / device.bf16_gemm_flop_per_s + attention.executed_flop / device.attention_flop_per_s
        )

    def test_another_lane_is_a_thread_that_is_handed_its_copies(self, lab, key):
        spec = lab(nodes=1)
        assert work_of(spec, Copy(key("x"), COMPUTE, MIB)).host_s == 0
        assert work_of(spec, Copy(key("x"), "reduce", MIB)).host_s == pytest.approx(spec.runtime.host.launch_s)


def ends(execution):
    """When each op of a lane ended."""
    return {span.key.what: span.end_s for span in execution.spans if span.lane != "host"}


class TestHostThatComputes:
    """Host 1 s for other lanes, latency 0.5 s there."""

    def run(self, ops, works):
        return engine.run(
            [Program("data", (0,), tuple(ops))],
            price=lambda op: works.get(op.key.what, Work(0.0, 0.0)),
            groups={"world": ((0,),)},
            link_capacities={"nic": 100.0},
            launch_queue_depth=1000,
            launch_latency_s=0.5,
            inline=COMPUTE,
        )

    def test_the_host_goes_on_when_its_kernel_has_ended(self, key):
        ops = [Compute(key("a")), HostTask(key("hook"), "visit"), Compute(key("b"))]
        works = {"a": Work(0.0, 10.0), "hook": Work(2.0, 0.0), "b": Work(0.0, 5.0)}
        execution = self.run(ops, works)
        assert execution.end_s == 17.0
        waits = [span for span in execution.spans if span.kind == "sync"]
        assert [(span.start_s, span.end_s, span.note) for span in waits] == [(0, 10, INLINE), (12, 17, INLINE)]

    def test_a_wait_of_its_lane_blocks_it(self, key):
        ops = [
            Copy(key("a"), "reduce", 1),
            Record(key("done"), "reduce", 0),
            Wait(key("wait"), COMPUTE, 0),
            HostTask(key("hook"), "visit"),
        ]
        execution = self.run(ops, {"a": Work(1.0, 10.0, 1), "hook": Work(2.0, 0.0)})
        assert execution.end_s == 1.5 - 1.0 + 0.0 + 11.0 + 2.0

    def test_other_lanes_share_the_core(self, key):
        """Each at half speed while both run."""
        ops = [Copy(key("a"), "reduce", 1), Compute(key("b")), Sync(key("end"))]
        execution = self.run(ops, {"a": Work(1.0, 4.0, 1), "b": Work(0.0, 10.0)})
        assert ends(execution) == {"a": 9.5, "b": 15.0}

    def test_a_collective_that_sleeps_takes_nothing_before_its_bytes_flow(self, key):
        gather = Collective(key("gather"), "nccl", "all_gather", "world", 10, 2)
        ops = [gather, Compute(key("a"))]
        work = Work(0.0, 8.0, 1, latency_s=4.0, link_bytes=(("nic", 400.0),), compute_share=0.5, sleeps=True)
        # From 0.5 s on 4 s of latency at full speed, 4 s of flow at half of it.
        assert ends(self.run(ops, {"gather": work, "a": Work(0.0, 10.0)})) == {"gather": 8.5, "a": 12.0}
        spinning = work._replace(sleeps=False)
        assert ends(self.run(ops, {"gather": spinning, "a": Work(0.0, 10.0)})) == {"gather": 8.5, "a": 14.0}


class TestFiles:
    def test_the_experiment_of_the_lab(self):
        spec = zsim.resolve(EXPERIMENT)
        assert (spec.cluster.num_nodes, spec.cluster.num_ranks, spec.cluster.cores_per_rank) == (2, 2, 1)
        assert spec.cluster.shaping.link_bytes_per_s == GBIT
        assert spec.runtime.optimisations.ring_collectives
        result = zsim.simulate(spec)
        assert result.metrics.fits
        assert result.metrics.work.num_parameters == 8 * (12 * 512**2 + 13 * 512) + (2048 + 128) * 512 + 2 * 512

    def test_a_slower_link_takes_longer(self):
        steps = [
            zsim.simulate(zsim.load(EXPERIMENT, [f"cluster.link_rate={rate} Gbit/s"])).step_time_s
            for rate in (0.5, 1, 4)
        ]
        assert steps[0] > steps[1] > steps[2]

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("cluster.link_rate=1", r"--set cluster.link_rate: given 1; allowed: text|lacks a unit"),
            ("cluster.link_rate=1 GB", "--set cluster.link_rate: '1 GB' has the unit 'GB'"),
            ("cluster.gpus_per_node=1", "lab has no GPUs; allowed: ranks_per_node"),
            ("cluster.ranks_per_node=0", "--set cluster.ranks_per_node: given 0; allowed: greater than or equal to 1"),
            (
                "runtime=deepspeed-0.5.4",
                r"deepspeed-0.5.4 with CPUs; its software is for GPUs; allowed: ddp, deepspeed-0.19, ",
            ),
            ("train.precision=fp16", "reference has no loss scaling; allowed: bf16 or fp32"),
        ],
    )
    def test_what_a_cluster_of_cpus_refuses(self, override, message):
        with pytest.raises(InputError, match=message):
            zsim.resolve(zsim.load(EXPERIMENT, [override]))

    @pytest.mark.parametrize("name", ["ranks_per_node=2", "cores_per_rank=2", "link_rate=1 Gbit/s"])
    def test_gpus_have_none_of_it(self, name):
        with pytest.raises(InputError, match=r"p4d\.24xlarge has GPUs; allowed: with a topology of CPUs, such as lab"):
            zsim.resolve(zsim.load("experiments/roberta_10b_p4d_after.yaml", [f"cluster.{name}"]))

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("mtu: 9000 B", "mtu: 90 kB", r"shaping.mtu: given '90 kB'; allowed: 576 B to 65521 B"),
            ("  burst: 128 KiB\n", "", "shaping.burst is missing"),
            ("congestion_control: cubic", "congestion_control: 3", "given 3; allowed: a name such as cubic or bbr"),
            ("cores_per_rank: 1", "cores_per_rank: 0", "cores_per_rank: given 0; allowed: a whole number from 1"),
            ("ranks_per_node: 1", "gpus_per_node: 1", "gpus_per_node: unknown key"),
        ],
    )
    def test_a_lab_file_that_is_wrong(self, tmp_path, old, new, message):
        text = (data.folder("topologies") / "lab.yaml").read_text("utf-8")
        assert old in text
        (tmp_path / "lab.yaml").write_text(text.replace(old, new))
        experiment = zsim.load(EXPERIMENT, [f"cluster.topology={tmp_path / 'lab.yaml'}"])
        with pytest.raises(InputError, match=message):
            zsim.resolve(experiment)


def test_names_of_links():
    assert (cpu.nic(1), cpu.loopback(0)) == ("nic[1]", "loopback[0]")


@pytest.mark.parametrize(
    ("runtime", "exposed", "hidden"),
    [
        ("deepspeed-0.19", "exposed_reduce", "all_gather"),
        ("fsdp2", "exposed_all_gather", ""),
        ("ddp", "", "all_reduce"),
    ],
)
def test_other_engines_wait_for_what_they_do_not_ask_to_be_asynchronous(runtime, exposed, hidden):
    """On a CPU: PyTorch's streams are empty shells there, and gloo returns when a collective is over."""
    torch_alone = [] if runtime.startswith("deepspeed") else ["deepspeed=null"]
    result = zsim.simulate(zsim.load(EXPERIMENT, [f"runtime={runtime}", *torch_alone]))
    metrics, running = result.metrics, {}
    for row in metrics.collectives:
        running[row.kind] = running.get(row.kind, 0.0) + row.seconds
    if exposed:
        kind = {"exposed_reduce": "reduce_scatter", "exposed_all_gather": "all_gather"}[exposed]
        spans = [span for span in result.trace.spans if span.rank == 0 and span.key.is_measured]
        waited_for = [span for span in spans if span.kind == kind]
        beside = [
            min(span.end_s, other.end_s) - max(span.start_s, other.start_s)
            for span in waited_for
            for other in spans
            if other.lane == COMPUTE
        ]
        # Other collectives may run meanwhile, but no computation.
        assert sum(max(0.0, seconds) for seconds in beside) < 0.05 * running[kind]
    if hidden:
        cause = "exposed_all_gather" if hidden == "all_gather" else "exposed_reduce"
        assert metrics.breakdown_s[cause] < 0.9 * running[hidden]
