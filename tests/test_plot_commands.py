"""`zsim plot` as users meet it: files, messages, exit codes."""

import pytest

import zsim.studies
from zsim import cli

SMALL = """\
question: q
model: {preset: gpt2-124m, layers: 2}
cluster: {topology: p4d.24xlarge, nodes: 2, price_per_node_hour: 30}
runtime: deepspeed-0.6.0
deepspeed: {bf16: {enabled: true}, zero_optimization: {stage: 3}}
train: {micro_batch: 2, seq_len: 128, precision: bf16, activation_checkpointing: full, tokens: 1e9}
"""
COMMANDS = {
    "timeline": 1,
    "before-after": 2,
    "ablation": 2,
    "scaling": 1,
    "bandwidth": 1,
    "memory": 1,
    "memory-timeline": 1,
    "flush-risk": 1,
    "fit-map": 1,
}
"""Name -> experiments that it takes."""
SLIDES = [name for name in COMMANDS if not name.endswith("timeline")]
START = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.fixture
def files(tmp_path):
    """A slower and a faster experiment."""
    paths = [tmp_path / "slow.yaml", tmp_path / "fast.yaml"]
    paths[0].write_text(SMALL.replace("0.6.0", "0.5.4"))
    paths[1].write_text(SMALL)
    return paths


@pytest.fixture
def plot(capsys):
    """Runs `zsim plot`: (exit code, stdout, stderr)."""

    def run(*arguments):
        code = cli.main(["plot", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def no_work(monkeypatch):
    """Fails where anything is simulated."""

    def fail(*_, **__):
        raise AssertionError("simulated before the output was known to be writable")

    for name in ("contrast", "ablation", "scaling", "required_bandwidth", "memory_by_stage", "fit_map", "flush_risk"):
        monkeypatch.setattr(zsim.studies, name, fail)
    monkeypatch.setattr(zsim, "simulate", fail, raising=False)


def given(name, files):
    return files[: COMMANDS[name]] if COMMANDS[name] == 2 else files[1:]


@pytest.mark.parametrize(
    ("name", "suffix"), [(name, ".png") for name in COMMANDS] + [("memory", ".svg"), ("scaling", ".pdf")]
)
def test_a_picture_is_written_and_nothing_else(plot, files, tmp_path, name, suffix):
    out = tmp_path / f"picture{suffix}"
    code, printed, err = plot(name, *given(name, files), "--out", out)
    assert (code, err) == (0, "")
    assert out.read_bytes().startswith(START[suffix])
    assert bool(printed) == (name == "bandwidth")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fast.yaml", out.name, "slow.yaml"]


def test_the_same_picture_has_the_same_bytes(plot, files, tmp_path):
    for name in ("one.svg", "other.svg"):
        assert plot("scaling", *files, "--nodes", "1,2", "--out", tmp_path / name)[0] == 0
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


def test_bandwidth_prints_its_answers(plot, files, tmp_path):
    code, out, _ = plot("bandwidth", *files, "--out", tmp_path / "x.png")
    lines = out.splitlines()
    assert code == 0
    assert len(lines) == 8
    assert lines[0].startswith("deepspeed-0.5.4: exposed communication ")
    assert lines[0].endswith("of the step with 400 Gbit/s per node")
    assert [line.split()[:2] for line in lines[1:3]] == [["below", "20%"], ["below", "5%"]]


def test_overrides_reach_the_runs(plot, files, tmp_path):
    out = tmp_path / "x.svg"
    assert plot("memory", files[1], "--set", "runtime=deepspeed-0.5.10", "--out", out)[0] == 0
    assert plot("memory", files[1], "--set", "runtime=deepspeed-0.19.0", "--out", out)[0] == 2
    assert plot("scaling", files[1], "--set", "cluster.nodes=7", "--nodes", "1,2", "--out", out)[0] == 0


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("picture.jpg", "ends in '.jpg', allowed are .png, .svg, .pdf"),
        ("picture", "ends in 'nothing', allowed are"),
        ("nowhere/picture.png", "cannot write into"),
        ("/dev/full/picture.png", "cannot write into"),
        ("folder.png", "is a folder"),
    ],
)
def test_an_impossible_output_is_said_before_the_work(plot, files, tmp_path, no_work, name, out, said):
    (tmp_path / "folder.png").mkdir()
    code, printed, err = plot(name, *given(name, files), "--out", tmp_path / out)
    assert (code, printed) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("scaling", *"123456"), "6 experiments; allowed: at most 5"),
        (("bandwidth", *"123456"), "6 experiments; allowed: at most 5"),
        (("fit-map", "1", "--nodes", "1,2,3,4,5,6,7,8,9,10,11,12,13"), "1 x 13 cells; allowed: at most 12 x 12"),
    ],
)
def test_too_much_for_a_picture_is_said_before_the_work(plot, tmp_path, monkeypatch, no_work, arguments, said):
    monkeypatch.chdir(tmp_path)
    for number in "123456":
        (tmp_path / number).write_text(SMALL)
    code, _, err = plot(*arguments, "--out", "x.png")
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


@pytest.mark.parametrize("name", COMMANDS)
def test_an_input_is_never_overwritten(plot, files, tmp_path, no_work, name):
    link = tmp_path / "link.png"
    link.symlink_to(files[1])
    code, _, err = plot(name, *given(name, files), "--out", link)
    assert (code, err.count("\n")) == (2, 1)
    assert "would overwrite the input" in err
    assert files[1].read_text() == SMALL


@pytest.mark.parametrize("name", SLIDES)
def test_a_wrong_experiment_is_one_line_and_leaves_the_old_picture(plot, files, tmp_path, name):
    files[1].write_text(SMALL.replace("seq_len", "seqlen"))
    out = tmp_path / "x.png"
    out.write_text("old")
    code, _, err = plot(name, *given(name, files), "--out", out)
    assert (code, err.count("\n")) == (2, 1)
    assert "seq_len" in err
    assert out.read_text() == "old"


@pytest.mark.parametrize(
    "arguments",
    [
        ("scaling", "--nodes", ""),
        ("scaling", "--nodes", "1,,2"),
        ("scaling", "--nodes", "0"),
        ("scaling", "--nodes", "1,2.5"),
        ("scaling", "--nodes", "-1"),
        ("scaling", "--nodes", "9999999"),
        ("scaling", "--rate", "miles"),
        ("fit-map", "--micro-batches", "x"),
        ("fit-map", "--nodes", "²"),
        ("fit-map", "--micro-batches", "1,2,3,4,5,6,7,8,9,10,11,12,13"),
        ("fit-map", "--value", "cost", "--set", "cluster.price_per_node_hour=0"),
        ("bandwidth", "--set", "cluster.nodes=1"),
        ("memory", "--set", "nonsense"),
        ("before-after",),
        ("ablation",),
    ],
)
def test_bad_arguments_are_one_line(plot, files, tmp_path, arguments):
    name, *rest = arguments
    code, out, err = plot(name, files[1], *rest, "--out", tmp_path / "x.png")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert not (tmp_path / "x.png").exists()


def test_a_full_disk_is_said(plot, files, tmp_path):
    out = tmp_path / "full.png"
    out.symlink_to("/dev/full")
    code, _, err = plot("memory", files[1], "--out", out)
    assert (code, err.count("\n")) == (2, 1)
    assert "No space left" in err


def test_interruption_is_exit_code_130_and_keeps_the_old_picture(plot, files, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(zsim.studies, "memory_by_stage", interrupt)
    out = tmp_path / "x.png"
    out.write_text("old")
    assert plot("memory", files[1], "--out", out)[0] == 130
    assert out.read_text() == "old"
