"""Random programs for allocators, and what two of them do with one."""

import random

from zsim.allocator import FLUSH, AllocatorSettings

MIB = 2**20
EDGES = (1, 511, 512, 513, MIB - 1, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1, 11 * MIB, 20 * MIB, 21 * MIB)
ROUNDINGS = ((0,) * 16, (0,) * 16, (2,) * 16, (8,) * 16, (1,) * 3 + (4,) * 13)


def random_settings(rng):
    """Any setting may meet any other."""
    large = rng.choice((20, 20, 20, 12, 32)) * MIB
    most = rng.choice((2**62, 2**62, large, large + 4 * MIB, 48 * MIB))
    collects = rng.random() < 0.3
    return AllocatorSettings(
        large_segment_bytes=large,
        max_split_bytes=max(most, large),
        max_non_split_rounding_bytes=max(large, rng.choice((20, 40)) * MIB),
        roundup_power2_divisions=rng.choice(ROUNDINGS),
        garbage_collection_threshold=rng.choice((0.3, 0.6, 0.9)) if collects else 0.0,
        expandable_segments=rng.random() < 0.35,
        per_process_memory_fraction=rng.choice((0.5, 0.8, 1.0)) if collects or rng.random() < 0.1 else 0.0,
        one_event_queue=rng.random() < 0.3,
    )


def random_size(rng, capacity):
    """Now and then an edge of a rule, or more than there is."""
    dice = rng.random()
    if dice < 0.25:
        return rng.choice(EDGES)
    if dice < 0.26:
        return rng.randrange(capacity // 2, 2 * capacity)
    return int(2 ** rng.uniform(8, 26)) if dice < 0.8 else int(2 ** rng.uniform(20, 26))


def random_trace(seed, num_operations=40):
    """Settings, capacity and operations; what they do depends on nothing else."""
    rng = random.Random(seed)
    capacity = int(2 ** rng.uniform(26, 29))
    live, operations, finished, handle = [], [], [0, 0, 0], 0
    for _ in range(num_operations):
        dice = rng.random()
        if dice < 0.55 or not live:
            operations.append(("malloc", handle, random_size(rng, capacity), rng.choice((0, 0, 1, 2))))
            live.append(handle)
            handle += 1
        elif dice < 0.92:
            at = rng.randrange(len(live))
            live[-1], live[at] = live[at], live[-1]
            uses = [(rng.randrange(3), rng.randrange(60)) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
            operations.append(("free", live.pop(), uses))
        elif dice < 0.98:
            finished = [count + rng.randrange(15) for count in finished]
            operations.append(("finish", finished))
        else:
            operations.append(("empty",))
    return random_settings(rng), capacity, operations


def run(made, operations):
    """Outcomes and addresses; flushes as they come."""
    found, finished = [], [0, 0, 0]
    for operation in operations:
        match operation:
            case ("malloc", handle, nbytes, stream):
                made.process_events(finished)
                outcome = made.malloc(handle, nbytes, stream)
                found.append(outcome)
                if outcome == FLUSH:
                    found += [list(made.pending()), made.flush_and_malloc(handle, nbytes, stream)]
                found.append(made.address(handle))
            case ("free", handle, uses):
                for stream, count in uses:
                    made.record_stream(handle, stream, count)
                made.free(handle)
            case ("finish", finished):
                pass
            case ("empty",):
                made.empty_cache()
    return found
