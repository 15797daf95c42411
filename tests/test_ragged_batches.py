"""Batches of unequal length: drawn alike for any number of steps, each with activations of other sizes."""

import pytest
from strategy_cases import bert, resolved

from zsim import programs, simulate
from zsim.noise_spec import PADDING, NoiseSpec
from zsim.ops import Alloc
from zsim.reading.resolution import load, resolve
from zsim.trace import DEVICE_MALLOC
from zsim.units import InputError

SHORTEST, LONGEST = 20, 1000


def lengths(seed=0, steps=50, micros=2):
    noise = NoiseSpec(seed, steps, host_jitter=0.0, shortest_seq_len=SHORTEST)
    return {(step, micro): noise.seq_len(step, micro, LONGEST) for step in range(steps) for micro in range(micros)}


def test_lengths_are_padded_and_within_bounds():
    drawn = lengths()
    assert all(length % PADDING == 0 and SHORTEST <= length <= LONGEST for length in drawn.values())
    assert len(set(drawn.values())) > 50
    assert min(drawn.values()) < 100
    assert max(drawn.values()) > 900


def test_a_length_depends_on_seed_step_and_micro_batch_alone():
    assert lengths(steps=3).items() <= lengths(steps=50).items()
    assert lengths(seed=1) != lengths(seed=0)


def test_the_longest_need_not_be_a_multiple():
    noise = NoiseSpec(0, 1, host_jitter=0.0, shortest_seq_len=99)
    assert noise.seq_len(0, 0, longest=99) == 99
    assert NoiseSpec(0, 1, host_jitter=0.0).seq_len(0, 0, longest=99) == 99


def ragged(folder, steps=6, shortest=SHORTEST, **changes):
    resolved(folder, "ddp", model=bert(max_positions=LONGEST), micro_batch=4, seq_len=LONGEST)
    path = folder / "small.yaml"
    sets = [f"noise={{steps: {steps}, shortest_seq_len: {shortest}}}"] if shortest else [f"noise.steps={steps}"]
    return resolve(load(path, sets + [f"{key}={value}" for key, value in changes.items()]))


def test_activations_differ_from_step_to_step_and_states_do_not(tmp_path):
    (program,) = programs(ragged(tmp_path))
    sizes = {}
    for op in program.ops:
        if isinstance(op, Alloc) and op.category in {"activations", "gradients"}:
            sizes.setdefault(op.category, {}).setdefault(op.key.step, []).append(op.nbytes)
    assert len({tuple(of_step) for of_step in sizes["activations"].values()}) == 6
    assert len({tuple(of_step) for of_step in sizes["gradients"].values()}) == 1


def test_throughput_counts_the_tokens_there_are(tmp_path):
    spec = ragged(tmp_path)
    metrics = simulate(spec).metrics
    drawn = [spec.noise.seq_len(step, 0, LONGEST) for step in range(6)]
    assert metrics.tokens_per_s_per_gpu * metrics.step_time_s == pytest.approx(4 * sum(drawn) / 6)
    whole = simulate(ragged(tmp_path, shortest=0)).metrics
    assert metrics.work.model_flop_per_rank < 0.8 * whole.work.model_flop_per_rank


def calls_of_the_device(spec):
    """Steps in which some memory is taken from the device, and what that costs."""
    spans = [span for span in simulate(spec).trace.spans if span.note == DEVICE_MALLOC and span.key.is_measured]
    return {span.key.step for span in spans}, sum(span.end_s - span.start_s for span in spans)


def test_a_batch_longer_than_all_before_pays_for_what_it_takes_from_the_device(tmp_path):
    spec = ragged(tmp_path)
    longest, expected = max(spec.noise.seq_len(step, 0, LONGEST) for step in (-2, -1)), set()
    for step in range(6):
        if spec.noise.seq_len(step, 0, LONGEST) > longest:
            longest = spec.noise.seq_len(step, 0, LONGEST)
            expected.add(step)
    steps, seconds = calls_of_the_device(spec)
    assert expected
    assert expected <= steps
    assert seconds > 0
    assert calls_of_the_device(ragged(tmp_path, shortest=0)) == (set(), 0)


def test_equal_lengths_leave_the_program_as_it_is(tmp_path):
    assert programs(ragged(tmp_path, shortest=LONGEST)) == programs(ragged(tmp_path, shortest=0))


@pytest.mark.parametrize("given", [LONGEST + 1, 0, "many"])
def test_what_is_no_length_is_refused(tmp_path, given):
    with pytest.raises(InputError, match=r"noise\.shortest_seq_len"):
        ragged(tmp_path, shortest=given or "0")


def test_where_zsim_also_trains_batches_have_one_length(tmp_path):
    resolved(tmp_path, "reference", topology="lab", model=bert(max_positions=LONGEST), zero={"stage": 3})
    with pytest.raises(InputError, match="on GPUs"):
        resolve(load(tmp_path / "small.yaml", ["noise.shortest_seq_len=8"]))
