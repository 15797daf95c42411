"""PYTORCH_CUDA_ALLOC_CONF: read as PyTorch reads it, or refused with one line."""

import ctypes
from pathlib import Path

import pytest

import zsim
from zsim.allocator_settings import UNLIMITED, AllocatorSettings
from zsim.reading.allocator_conf import WITHOUT_EFFECT, parse
from zsim.reading.documents import InputError

MIB = 2**20
EXPERIMENT = Path(__file__).parents[1] / "experiments" / "roberta_10b_p4d_before.yaml"

GOOD = {
    "": {},
    " , ": {},
    "expandable_segments:True": {"expandable_segments": True},
    " expandable_segments : False , max_split_size_mb : 64 ": {"max_split_bytes": 64 * MIB},
    "max_split_size_mb:64,max_split_size_mb:128": {"max_split_bytes": 128 * MIB},
    "max_split_size_mb:20": {"max_split_bytes": 20 * MIB},
    "large_segment_size_mb:11": {"large_segment_bytes": 11 * MIB, "max_non_split_rounding_bytes": 11 * MIB},
    "max_split_size_mb:200,large_segment_size_mb:100,max_non_split_rounding_mb:101": {
        "large_segment_bytes": 100 * MIB,
        "max_split_bytes": 200 * MIB,
        "max_non_split_rounding_bytes": 101 * MIB,
    },
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.5": {
        "garbage_collection_threshold": 0.8,
        "per_process_memory_fraction": 0.5,
    },
    "roundup_power2_divisions:4": {"roundup_power2_divisions": (4,) * 16},
    "roundup_power2_divisions:[256:1,512:2,>:4]": {"roundup_power2_divisions": (1,) * 9 + (2,) + (4,) * 6},
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]": {
        "roundup_power2_divisions": (1,) * 9 + (2, 4) + (8,) * 5,
    },
}


@pytest.mark.parametrize("text", GOOD)
def test_what_a_string_sets(text):
    assert parse(text, "x.yaml:3: conf").settings == AllocatorSettings(**GOOD[text])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("expandable_segment:True", "unknown key 'expandable_segment'; did you mean 'expandable_segments'?"),
        ("roundup_bypass_threshold_mb:64", "unknown key"),
        ("expandable_segments:true", "expandable_segments: given 'true'; allowed: True or False"),
        ("expandable_segments", "'expandable_segments' is no key:value"),
        ("expandable_segments:", "is no key:value"),
        ("max_split_size_mb=64", "is no key:value"),
        ("max_split_size_mb:64 garbage_collection_threshold:0.5", "is no key:value"),
        ("max_split_size_mb:19", "max_split_size_mb: given '19'; allowed: a whole number of MiB from 20"),
        ("max_split_size_mb:64abc", "max_split_size_mb: given '64abc'"),
        ("max_split_size_mb:-5", "max_split_size_mb: given '-5'"),
        ("max_split_size_mb:1.5", "max_split_size_mb: given '1.5'"),
        ("max_split_size_mb:" + "9" * 500, "max_split_size_mb: given '999"),
        ("max_split_size_mb:100,large_segment_size_mb:200", "from 200, the large_segment_size_mb"),
        ("large_segment_size_mb:10", "a whole number of MiB from 11"),
        ("max_non_split_rounding_mb:10", "a whole number of MiB from 20"),
        ("garbage_collection_threshold:1.0", "allowed: between 0 and 1"),
        ("garbage_collection_threshold:0", "allowed: between 0 and 1"),
        ("garbage_collection_threshold:nan", "allowed: between 0 and 1"),
        ("per_process_memory_fraction:1.5", "allowed: above 0 and at most 1"),
        ("roundup_power2_divisions:3", "allowed: a power of two"),
        ("roundup_power2_divisions:0", "allowed: a power of two"),
        ("roundup_power2_divisions:[3:2]", "a size that is a power of two of MiB"),
        ("roundup_power2_divisions:[0:4]", "a size that is a power of two of MiB"),
        ("roundup_power2_divisions:[256:3]", "0 or a power of two of them"),
        ("roundup_power2_divisions:[256]", "allowed: size:divisions"),
        ("roundup_power2_divisions:[256:1,512:2", "is no key:value"),
        ("backend:cudaMallocAsync", "allowed: native"),
    ],
)
def test_what_is_refused(text, words):
    with pytest.raises(InputError) as error:
        parse(text, "x.yaml:3: conf")
    message = str(error.value)
    assert message.startswith("x.yaml:3: conf: ")
    assert words in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("text", "start"),
    [(f"{key}:1" if key != "backend" else "backend:native", f"{key} has no effect: ") for key in WITHOUT_EFFECT]
    + [
        (
            "garbage_collection_threshold:0.8",
            "garbage_collection_threshold has no effect: nothing is collected without",
        ),
        ("max_non_split_rounding_mb:40", "max_non_split_rounding_mb has no effect: max_split_size_mb is not given"),
    ],
)
def test_what_changes_nothing_is_said(text, start):
    (note,) = parse(text, "conf").notes
    assert note.startswith(start)


DIVISIONS = [
    *(text for text in GOOD if "divisions" in text),
    "roundup_power2_divisions:[>:8]",
    "roundup_power2_divisions:[1:2,65536:8]",
    "roundup_power2_divisions:[512:2,256:4,>:16]",
    "roundup_power2_divisions:[131072:4]",
    "roundup_power2_divisions:[256:0]",
    "roundup_power2_divisions:[]",
    "roundup_power2_divisions:[256:2,]",
]


def test_torch_reads_the_same():
    """Its own parser, which a build without CUDA has too; what it takes, and how it rounds."""
    torch = pytest.importorskip("torch")
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    divisions = library._ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm
    divisions.restype, divisions.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    set_conf = torch._C._accelerator_setAllocatorSettings
    for text in DIVISIONS:
        set_conf(text)
        found = tuple(divisions(MIB << interval) for interval in range(16))
        assert parse(text, "conf").settings.roundup_power2_divisions == found, text
        assert (divisions(1000), divisions(2**45)) == (found[0], found[-1])
    for text in GOOD:
        set_conf("large_segment_size_mb:20," + text.strip(" ,"))
    for text in ("max_split_size_mb:19", "large_segment_size_mb:10", "max_non_split_rounding_mb:10"):
        with pytest.raises(ValueError, match="must be"):
            set_conf("large_segment_size_mb:20," + text if "large" not in text else text)
    set_conf("large_segment_size_mb:20")


def test_the_experiment_key():
    conf = "expandable_segments:True,max_split_size_mb:64"
    spec = zsim.resolve(zsim.load(EXPERIMENT, [f"environment.PYTORCH_CUDA_ALLOC_CONF={conf}"]))
    assert spec.allocator.expandable_segments
    assert spec.allocator.max_split_bytes == 64 * MIB
    assert spec.allocator.one_event_queue  # software of 2021
    assert zsim.resolve(zsim.load(EXPERIMENT)).allocator.max_split_bytes == UNLIMITED
    with pytest.raises(InputError, match=r"--set environment.PYTORCH_CUDA_ALLOC_CONF: max_split_size_mb: given '1'"):
        zsim.resolve(zsim.load(EXPERIMENT, ["environment.PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:1"]))
    with pytest.raises(InputError, match=r"unknown key; did you mean 'PYTORCH_CUDA_ALLOC_CONF'"):
        zsim.load(EXPERIMENT, ["environment.PYTORCH_ALLOC_CONF=max_split_size_mb:100"])


def test_keys_without_effect_are_warnings_of_the_run():
    conf = "environment.PYTORCH_CUDA_ALLOC_CONF=pinned_num_register_threads:8"
    warnings = zsim.resolve(zsim.load(EXPERIMENT, [conf])).warnings
    assert any(
        line.startswith("environment.PYTORCH_CUDA_ALLOC_CONF: pinned_num_register_threads has no effect")
        for line in warnings
    )
