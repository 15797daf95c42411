"""Logs of collectives, as benchmarks and their launchers write them."""

import os
from pathlib import Path

import pytest
from collective_cases import COLUMNS, GIB, INFO, SIZES, row, table, time_of
from hypothesis import given
from hypothesis import strategies as st

from zsim.imports.collective_logs import read_collective_log
from zsim.imports.collective_measurements import Hints, bus_factor, ranks_of, ratio_of
from zsim.units import InputError

EIGHT = time_of(20e-6, 230e9)
FOUR_NODES = time_of(120e-6, 92e9)


@pytest.fixture
def read(tmp_path):
    def reading(lines, name="run.log", **hints):
        path = tmp_path / name
        path.write_text(lines if isinstance(lines, str) else "\n".join(lines) + "\n", encoding="utf-8")
        return read_collective_log(path, Hints(**hints))

    return reading


def refused(read, lines, *said, name="run.log", **hints):
    with pytest.raises(InputError) as error:
        read(lines, name, **hints)
    assert "\n" not in str(error.value)
    for part in said:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "prefix",
    ["", "0: ", "[1,0]<stdout>:", "[1,0]&lt;stdout&gt;:", "[1,0]&lt;stdout>:", "2026-01-31T10:00:00Z pod-0 | "],
)
def test_prefixes_of_launchers(read, prefix):
    log = read([f"{prefix}{line}" for line in table("all_reduce", 8, EIGHT)])
    assert (log.format, len(log.measurements), log.remarks) == ("nccl-tests", 2 * len(SIZES), ())
    last = log.measurements[-1]
    assert (last.collective, last.num_ranks, last.in_place, last.message_bytes) == ("all_reduce", 8, True, 4 * GIB)
    assert last.busbw_bytes_per_s == pytest.approx(230e9 / 1.01, rel=1e-3)
    assert last.algbw_bytes_per_s * bus_factor("all_reduce", 8) == last.busbw_bytes_per_s


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [2, 3, 8, 16, 64, 256])
def test_collective_and_ranks_come_from_the_columns(read, collective, ranks):
    log = read(table(collective, ranks, time_of(50e-6, 100e9)), collective=collective, gpus_per_node=8)
    assert {each.num_ranks for each in log.measurements} == {ranks}
    if collective == "reduce_scatter":
        assert read(table(collective, ranks, EIGHT)).measurements[0].collective == collective


def test_what_stands_between_header_and_table(read):
    header, *rows = table("all_reduce", 8, EIGHT)
    lines = [
        "# nThread 1 nGpus 8 minBytes 8 maxBytes 4294967296 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 10",
        *(
            f"#  Rank {rank} Group  0 Pid  812 on node{rank // 4} device {rank % 4} [0x10] NVIDIA A100"
            for rank in range(8)
        ),
        "NCCL version 2.18.5+cuda12.2",
        header,
        INFO,
        "node3:812:840 [0] NCCL INFO Using network Socket",
        "node3:812:840 [0] NCCL INFO NCCL_ALGO set by environment to Ring",
        *rows[:20],
        "...",
        *rows[20:],
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 52.9753",
    ]
    log = read(lines)
    assert log.facts == (8, 2, "2.18.5", "Socket", "ring")
    assert {(each.num_ranks, each.num_nodes, each.algorithm) for each in log.measurements} == {(8, 2, "ring")}
    assert len(log.measurements) == 2 * len(SIZES)


@pytest.mark.parametrize(
    ("said", "algorithm"),
    [("=Ring", "ring"), ("=^NVLS,NVLSTree", ""), ("=Ring,Tree", ""), (" set by environment to Tree", "tree"), ("", "")],
)
def test_an_algorithm_that_was_forced(read, said, algorithm):
    lines = [f"mpirun -x NCCL_ALGO{said} ./all_reduce_perf -b 8", *table("all_reduce", 8, EIGHT)]
    assert read(lines).facts.algorithm == algorithm


def test_an_abbreviated_list_of_ranks_tells_no_nodes(read):
    ranks = [f"#  Rank {rank} Group 0 Pid 1 on node{rank // 8} device 0 [0x10] NVIDIA A100" for rank in (0, 1, 2, 63)]
    log = read([*ranks, *table("all_reduce", 64, FOUR_NODES)])
    assert (log.facts.num_ranks, log.facts.num_nodes) == (64, None)


def test_columns_of_older_and_other_versions(read):
    """Without root, without redop and root, N/A or an error instead of a count, sizes of 0, two bytes a number."""
    read_all = (
        read(table("all_reduce", 8, EIGHT, operation=("sum",), wrong="4e-07")),
        read(table("all_gather", 8, EIGHT, operation=(), wrong="N/A"), "all_gather.out"),
        read([*table("all_reduce", 8, EIGHT, type="bfloat16", width=2), row("all_reduce", 8, 0, 1e-5)]),
        read(table("all_reduce", 8, EIGHT, type="half", width=2, wrong="N/A")),
    )
    for log in read_all:
        assert {each.num_ranks for each in log.measurements} == {8}
        assert len(log.measurements) == 2 * len(SIZES)


def test_several_tests_in_one_log(read):
    log = read(
        [
            "# Collective test starting: all_gather_perf",
            *table("all_gather", 32, FOUR_NODES),
            "mpirun -np 32 ./build/reduce_scatter_perf -b 8 -e 4G -f 2",
            *table("reduce_scatter", 32, FOUR_NODES),
        ]
    )
    kinds = [each.collective for each in log.measurements]
    assert kinds == ["all_gather"] * 2 * len(SIZES) + ["reduce_scatter"] * 2 * len(SIZES)


def test_a_log_cut_within_a_line(read):
    text = "\n".join(table("all_reduce", 8, EIGHT))
    whole = len(read(text).measurements)
    for cut in range(1, 100):
        log = read(text[:-cut])
        assert whole - 3 <= len(log.measurements) <= whole
        assert all(each.busbw_bytes_per_s < 235e9 for each in log.measurements)
    assert "left out, a row that ends after" in read(text[:-60]).remarks[0]


def test_wrong_values_and_rows_that_contradict_themselves_are_left_out(read):
    lines = table("all_reduce", 8, EIGHT)
    lines[-1] = row("all_reduce", 8, SIZES[-1], EIGHT("all_reduce", 8, SIZES[-1]), wrong="17")
    lines[-2] = lines[-2].replace(lines[-2].split()[5], "1.00", 1)
    log = read(lines)
    assert len(log.measurements) == 2 * len(SIZES) - 3
    assert "17 wrong values" in log.remarks[-1]
    assert "its algbw is not size over time" in log.remarks[0]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["# nThread 1 nGpus 8", COLUMNS], ("no row of nccl-tests in 2 lines",)),
        ("epoch 1 loss 3.2\n", ("no table of measured collectives", "nccl-tests")),
        ("", ("no table of measured collectives",)),
        (table("all_gather", 8, EIGHT), ("which collective?", "all_gather and all_to_all", "--collective NAME")),
        (table("all_reduce", 4096, FOUR_NODES), ("how many ranks?", "--ranks N")),
        (
            [line.replace(".", "") for line in table("all_reduce", 8, EIGHT)[20:]],
            ("run.log:1: size over time", "us, algbw and busbw in GB/s"),
        ),
    ],
)
def test_what_cannot_be_read_says_why(read, lines, said):
    refused(read, lines, *said)


def test_hints_and_logs_that_contradict_the_bandwidths(read):
    lines = table("all_reduce", 8, EIGHT)
    refused(read, lines, "--ranks says 16 ranks", "fits 8 ranks", num_ranks=16)
    refused(read, lines, "--collective says all_gather", "fit all_reduce", collective="all_gather")
    refused(read, lines, "8 ranks cannot be on 9 nodes", num_nodes=9)
    refused(read, ["./reduce_scatter_perf -b 8", *lines], "reduce_scatter_perf says reduce_scatter")
    assert read(table("all_reduce", 4096, FOUR_NODES), num_ranks=4096).measurements[0].num_ranks == 4096


@given(st.integers(2, 64), st.floats(1, 500), st.sampled_from(["all_reduce", "all_gather"]))
def test_rounding_never_hides_the_true_number_of_ranks(ranks, algbw, collective):
    busbw = round(algbw * bus_factor(collective, ranks), 2)
    assert ranks in ranks_of(ratio_of([(round(algbw, 2), busbw)]), collective)


BLOCK = """{rank}:
 duration: {seconds:.4f} sec
 algo throughput: {throughput:.4f} bps, {gbps:.4f} Gbps
 busbw: {busbw:.4f}  Gbps
"""


def block(rank, seconds, ranks=4):
    """2021's benchmark counts the bytes twice."""
    throughput = 2 * 4e9 * 8 / seconds
    busbw = throughput * (ranks - 1) / ranks / 1e9
    return BLOCK.format(rank=rank, seconds=seconds, throughput=throughput, gbps=throughput / 1e9, busbw=busbw)


def test_three_generations_of_all_reduce_bench(read):
    first = "0 data size: 4.0 GB\n" + "".join(block(rank, 0.0479 + rank * 1e-5) for rank in range(4))
    old = read(INFO + "\n" + first)
    assert (old.format, len(old.measurements)) == ("all_reduce_bench", 4)
    assert old.measurements[0].busbw_bytes_per_s == pytest.approx(4e9 / 0.0479 * 1.5, rel=1e-6)
    second = read(
        "The average bandwidth of all_reduce with a 4.0GB payload (5 trials, 8 ranks):\n"
        " algbw: 225.420 GBps (1803.4 Gbps)\n busbw: 394.485 GBps (3155.9 Gbps)\n"
    ).measurements[0]
    assert (second.num_ranks, second.message_bytes) == (8, 4 * 10**9)
    third = read(
        "The average bandwidth of all_reduce over 8 ranks (5 warmups / 20 trials):\n\n"
        "| payload |    busbw   |    algbw   |\n| ------: | ---------: | ---------: |\n"
        "|    32KB |   0.02GBps |   0.01GBps |\n|    64MB | 350.00GBps | 200.00GBps |\n|     4GB | 455.00GBps | 260.0"
    )
    assert [each.message_bytes for each in third.measurements] == [64 * 2**20]
    assert third.measurements[0].time_s == pytest.approx(64 * 2**20 / 200e9)
    assert "too few decimals" in third.remarks[0]


def test_all_reduce_bench_in_other_units(read):
    refused(read, "data size: 4.0 GB\n" + block(0, 0.05).replace("0.0500 sec", "50.0 sec"), "run.log:3", "1280 Gbps")
    head = "average bandwidth of all_reduce over 8 ranks\n| payload | busbw | algbw |\n"
    refused(read, head + "| 1GB | 100.00GBps | 100.00GBps |", "run.log:3: busbw 100 GB/s", "1.75 times algbw")
    refused(read, block(0, 0.05), "without its payload")


def test_the_comms_logger_by_total_over_count(read):
    """Its average leaves out the slowest calls, its algbw counts bytes in a way of its own."""
    text = (
        "[INFO] [Rank 0] comm op: all_reduce | time (ms): 1.00 | msg size: 10.0 MB | algbw (Gbps): 167.77 |"
        " busbw (Gbps): 157.29\n"
        "Comm. Op            Message Size        Count               Total Latency(ms)   Avg Latency(ms)"
        "     tput_avg (Gbps)     busbw_avg (Gbps)\n"
        "all_gather_into_tensor\n"
        "                    1.0 MB              10                  50.00               2.00"
        "                67.11               62.91\n"
        "reduce_scatter_tensor | [Caller Func: reduce]\n"
        "                    64.0 MB             4                   20.00               4.00"
        "                2147.48             2013.27\n"
        "barrier\n"
        "                    0B                  4                   20.00               4.00  0.0   0.0\n"
        "all_reduce\n                    64.0 MB             4    20.\n"
    )
    log = read(text)
    assert [(each.collective, each.num_ranks) for each in log.measurements] == [
        ("all_reduce", 16),
        ("all_gather", 16),
        ("reduce_scatter", 16),
    ]
    call, gather, scatter = log.measurements
    assert (call.time_s, call.message_bytes) == (1e-3, 10 * 2**20)
    assert (gather.time_s, gather.message_bytes) == (5e-3, 16 * 2**20)
    assert (scatter.time_s, scatter.message_bytes) == (5e-3, 64 * 2**20)
    assert "row without all of its columns" in log.remarks[0]
    assert "wait for other ranks" in log.remarks[-1]


def test_the_comms_logger_without_stragglers(read):
    log = read(
        "Comm. Op  Message Size  Count  Total comm lat(ms)  Total straggler(ms)  Avg comm lat(ms)  Avg straggler(ms)\n"
        "all_reduce\n"
        "                    64.0 MB             4                   12.00     8.00     3.00      2.00\n",
        num_ranks=8,
    )
    assert log.measurements[0].time_s == pytest.approx(3e-3)
    assert log.remarks == ()


def test_galvatron(read):
    text = '{"allreduce_size_16_consec_1": 44.0, "allreduce_size_8_consec_1": 150.0, "allreduce_size_4_consec_0": 16.0}'
    log = read(text, "allreduce_bandwidth_2nodes_8gpus_per_node.json")
    found = [(each.num_ranks, each.num_nodes, each.num_groups, each.message_bytes) for each in log.measurements]
    assert found == [(16, 2, 1, None), (8, 1, 1, None), (4, 2, 4, None)]
    refused(read, text, "how many nodes?", name="bandwidth.json")
    name = "2nodes_8gpus.json"
    refused(read, '{"allreduce_size_5_consec_1": 1.0}', f"{name}:1: allreduce_size_5_consec_1", "divisor", name=name)
    refused(read, '{"allreduce_size_4_consec_1": "fast"}', "bus bandwidth in GB/s", name=name)
    refused(read, '{"allreduce_size_4_consec_1": 1.0, "p2p": 3}', "unknown key", name=name)


def test_csv(read):
    head = "hardware,nodes,gpus,collective,message_bytes,time_us,algbw_GBps,busbw_GBps,algorithm,verified\n"
    rows = (
        "A,4,32,all_gather,1073741824,12000,,,,yes\n"
        "A,4,32,all_reduce,1073741824,,46,,Ring,yes\n"
        "A,4,32,all_reduce,1073741824,,,92,NVLS from 2 MiB,\n"
        "A,4,32,all_reduce,,,,92,,yes\nA,4,32,p2p,100,1,,,,yes\nA,4,32,all_reduce,100,1,,,,recalled\n"
    )
    log = read(head + rows, "mine.csv")
    assert [(each.collective, each.algorithm) for each in log.measurements] == [
        ("all_gather", ""),
        ("all_reduce", "ring"),
        ("all_reduce", "nvls"),
    ]
    assert log.measurements[2].busbw_bytes_per_s == pytest.approx(92e9)
    assert len(log.remarks) == 3
    refused(read, head + rows + "B,1,8,all_reduce,8,1,,,,yes\n", "rows of 2 machines", "--hardware NAME")
    assert len(read(head + rows + "B,1,8,all_reduce,8,1,,,,yes\n", hardware="B").measurements) == 1
    refused(read, "collective,gpus,size\nall_reduce,8,1\n", "run.log:1: column message_bytes is missing")
    refused(read, "collective,gpus,message_bytes\nall_reduce,8,1\n", "no column of time_us, algbw_GBps, busbw_GBps")
    refused(read, head + "A,4,32,all_reduce,1073741824,12,89,,,yes\n", "run.log:2: message_bytes over time_us")
    refused(read, head + "A,40,32,all_reduce,1073741824,12,,,,yes\n", "32 ranks on 40 nodes")
    refused(read, head, "no row to use of 0")


def test_files_that_are_none(tmp_path):
    for path, said in ((tmp_path / "gone.log", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(InputError, match=said):
            read_collective_log(path)
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    with pytest.raises(InputError, match="not a text file"):
        read_collective_log(tmp_path / "binary")


OF_USERS = {
    "p4de_2nodes_all_reduce.txt": ("nccl-tests", 58, {("all_reduce", 16)}),
    "p5_2nodes_mpijob_excerpt.txt": ("nccl-tests", 12, {("all_reduce", 16)}),
    "bigscience_v100_n1_16gb_all_reduce_bench.txt": ("all_reduce_bench", 20, {("all_reduce", 4)}),
    "deepspeed_comms_logger_sample.txt": (
        "comms_logger", 8, {("broadcast", 16), ("reduce_scatter", 16), ("all_gather", 16)},
    ),
    "galvatron_allreduce_bandwidth_2nodes_8gpus.json": (
        "galvatron", 7, {("all_reduce", 2), ("all_reduce", 4), ("all_reduce", 8), ("all_reduce", 16)},
    ),
}  # fmt: skip


def test_logs_of_users():
    folder = os.environ.get("ZSIM_USER_FILES")
    if not folder:
        pytest.skip("ZSIM_USER_FILES names no folder of stored logs")
    paths = sorted(Path(folder, "nccl_logs").iterdir())
    assert {path.name for path in paths} == set(OF_USERS)
    for path in paths:
        log = read_collective_log(path)
        kinds = {(each.collective, each.num_ranks) for each in log.measurements}
        assert (log.format, len(log.measurements), kinds) == OF_USERS[path.name]
