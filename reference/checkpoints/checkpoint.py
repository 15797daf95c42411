"""Checkpoints that any number of ranks and any stage can go on from, by torch.distributed.checkpoint.

    FOLDER/step_00000100/    parameters, masters, moments: each by its name, flat, cut into the ranks' parts
                             training.json: step, shapes, and size and checksum of every file

A checkpoint is written under another name and gets its own when it is whole, so the last one always is.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from reference.sharding import ShardedModel
from reference.sharding.sharding import Moment, ShardedParameter
from zsim.units import InputError

SCHEMA = "zsim-checkpoint/1"
TRAINING = "training.json"
PARTIAL = ".partial"
REPLACED = f".replaced{PARTIAL}"
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training is."""

    step: int
    """Steps that have been made, which is the index of the next one."""
    seed: int
    """Of weights and data."""
    skipped_steps: tuple[int, ...] = ()


def save(sharded: ShardedModel, folder: Path, progress: Progress) -> Path:
    """Writes a checkpoint, each rank its part; all ranks call it together, between two steps.

    Raises:
        InputError: a ValueError: it cannot be written. The checkpoints before it are untouched.

    """
    sharded.device.settle()
    path = folder / f"step_{progress.step:08d}"
    partial = path.with_name(path.name + PARTIAL)
    rank = dist.get_rank()
    with _said(f"--checkpoint {folder}: cannot be written"):
        _on_first(lambda: _fresh(partial))
        writer = FileSystemWriter(partial)
        state_dict_saver.save(_divided_state(sharded), storage_writer=writer)
        files: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(files, _checksums(sorted(partial.glob(f"__{rank}_*"))))
        document = {
            "schema": SCHEMA,
            **asdict(progress),
            **_identity(sharded),
            "num_ranks": dist.get_world_size(),
            "stage": sharded.sharding.settings.zero.stage,
            "files": {name: checksum for of_rank in files for name, checksum in of_rank.items()},
        }
        _on_first(lambda: _complete(partial, path, document))
    return path


def last(folder: Path) -> Path:
    """The last whole checkpoint of a folder.

    Raises:
        InputError: a ValueError: there is none.

    """
    whole = [path for path in sorted(folder.glob("step_*")) if not path.name.endswith(PARTIAL)]
    if not whole:
        raise InputError(f"--resume: no checkpoint in {folder}; allowed: a folder that --checkpoint has filled")
    return whole[-1]


def load(sharded: ShardedModel, folder: Path) -> Progress:
    """Puts the last checkpoint of a folder into a model, bit for bit; all ranks call it together.

    Raises:
        InputError: a ValueError: there is none, it is damaged, or it is of something else.

    """
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        found = [_outcome(lambda: last(folder))]
    dist.broadcast_object_list(found)
    path: Path = _raised(found)[0]
    document = _agreed(lambda: _read(path, sharded))
    with _said(f"--resume: {path} is damaged"):
        reader = FileSystemReader(path)
        state = _receiving_state(sharded, reader.read_metadata())
        state_dict_loader.load(state, storage_reader=reader)
    with torch.no_grad():
        sharded.sharding.restored(Moment(document["step"], 0, "init", -1))
    sharded.device.settle()
    sharded.step_index = document["step"]
    return Progress(document["step"], document["seed"], tuple(document["skipped_steps"]))


# ---------------------------------------------------------------------- state


def _divided_state(sharded: ShardedModel) -> dict[str, Any]:
    """Every tensor by name; what is as long as its parameter, as this rank's part of it."""
    mesh, size = init_device_mesh(sharded.device.where.type, (dist.get_world_size(),)), dist.get_world_size()

    def divided(parameter: ShardedParameter, tensor: Tensor) -> DTensor:
        length = -(-parameter.numel // size)
        begin = min(dist.get_rank() * length, parameter.numel)
        # In stage 0 the tensor is whole, else it is this rank's padded part.
        offset = begin if sharded.sharding.settings.zero.stage == 0 else 0
        own = tensor.detach()[offset : offset + min(length, parameter.numel - begin)]
        return DTensor.from_local(
            own, mesh, [Shard(0)], run_check=False, shape=torch.Size((parameter.numel,)), stride=(1,)
        )

    state: dict[str, Any] = {}
    for name, parameter, tensor in _tensors(sharded):
        state[name] = divided(parameter, tensor) if tensor.dim() else tensor
    return state | _buffers(sharded)


def _receiving_state(sharded: ShardedModel, metadata: Metadata) -> dict[str, Any]:
    """Likewise to read into; the optimizer gets the states that the checkpoint has."""
    _make_moments(sharded, metadata)
    if sharded.sharding.settings.zero.stage == 3:
        return _divided_state(sharded)
    state = _divided_state(sharded)
    for parameter in sharded.parameters:
        # Read whole by every rank: nothing has to be gathered.
        assert parameter.full is not None
        state[f"parameters.{parameter.name}"] = parameter.full[: parameter.numel]
    if sharded.sharding.settings.zero.stage == 0:
        state |= {name: tensor.detach() for name, _, tensor in _tensors(sharded)}
    return state


def _tensors(sharded: ShardedModel) -> Iterator[tuple[str, ShardedParameter, Tensor]]:
    step = sharded.sharding.optimizer
    for parameter in sharded.parameters:
        yield f"parameters.{parameter.name}", parameter, parameter.shard
        master = step.masters.get(parameter.name)
        if master is None:
            continue
        if sharded.sharding.settings.needs_master:
            yield f"masters.{parameter.name}", parameter, master
        for key, value in step.optimizer.state.get(master, {}).items():
            if isinstance(value, Tensor):
                yield f"optimizer.{key}.{parameter.name}", parameter, value


def _buffers(sharded: ShardedModel) -> dict[str, Tensor]:
    return {f"buffers.{name}": buffer for name, buffer in sharded.module.named_buffers()}


def _make_moments(sharded: ShardedModel, metadata: Metadata) -> None:
    step = sharded.sharding.optimizer
    step.optimizer.state.clear()
    for name, master in step.masters.items():
        for path, stored in metadata.state_dict_metadata.items():
            kind, _, rest = path.partition(".")
            key, _, of = rest.partition(".")
            if kind != "optimizer" or of != name or not isinstance(stored, TensorStorageMetadata):
                continue
            shape = master.shape if len(stored.size) else ()
            step.optimizer.state[master][key] = torch.zeros(
                shape, dtype=stored.properties.dtype, device=sharded.device.where
            )


# ---------------------------------------------------------------------- files


def _identity(sharded: ShardedModel) -> dict[str, Any]:
    """What a checkpoint must agree in with the model that it is put into."""
    settings = sharded.sharding.settings
    return {
        "parameters": {p.name: [list(p.shape), p.trained] for p in sharded.parameters},
        "precision": str(settings.dtype).removeprefix("torch."),
        "optimizer": settings.optimizer.kind,
    }


def _read(path: Path, sharded: ShardedModel) -> dict[str, Any]:
    """The checked description; each rank looks at some of the files."""
    with _said(f"--resume: {path} is damaged"):
        document = _described(path / TRAINING)
        if document["schema"] != SCHEMA:
            raise InputError(f"--resume: {path} has schema {document['schema']}; allowed: {SCHEMA}")
        for index, (name, checksum) in enumerate(sorted(document["files"].items())):
            if index % dist.get_world_size() == dist.get_rank() and _checksums([path / name])[name] != checksum:
                raise InputError(f"--resume: {path} is damaged: {name} is not what was written")
        for what, own in _identity(sharded).items():
            if document[what] != own:
                raise InputError(f"--resume: {path} is of another run: {_difference(what, document[what], own)}")
    return document


def _described(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise TypeError(f"{path.name} holds no JSON object")
    kinds: dict[str, type] = {
        "schema": str, "step": int, "seed": int, "skipped_steps": list, "files": dict, "parameters": dict,
        "precision": str, "optimizer": str,
    }  # fmt: skip
    for key, kind in kinds.items():
        if not isinstance(document.get(key), kind):
            raise TypeError(f"{path.name} has no {key}, or another kind of value")
    return document


def _difference(what: str, stored: Any, own: Any) -> str:
    if not isinstance(own, Mapping):
        return f"{what} {stored} there, {own} here"
    name = next(name for name in (*stored, *own) if stored.get(name) != own.get(name))
    there, here = (
        "absent" if of is None else f"shape {of[0]}, trained {of[1]}" for of in (stored.get(name), own.get(name))
    )
    return f"parameter {name}: {there} there, {here} here"


def _checksums(paths: list[Path]) -> dict[str, list[int]]:
    """Bytes and CRC-32 of files, by name."""
    found = {}
    for path in paths:
        crc = 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                crc = zlib.crc32(chunk, crc)
            found[path.name] = [file.tell(), crc]
    return found


def _fresh(partial: Path) -> None:
    """Removes what saves that were interrupted have left."""
    for left in partial.parent.glob(f"step_*{PARTIAL}"):
        shutil.rmtree(left)
    partial.mkdir(parents=True)


def _complete(partial: Path, path: Path, document: dict[str, Any]) -> None:
    metadata = partial / ".metadata"
    document["files"] |= _checksums([metadata])
    with (partial / TRAINING).open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    replaced = path.with_name(path.name + REPLACED)
    if path.exists():
        # Made before by a run that began earlier and came as far; whole until the new one has its name.
        path.rename(replaced)
    partial.rename(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    shutil.rmtree(replaced, ignore_errors=True)


# ---------------------------------------------------------------------- ranks


@contextmanager
def _said(what: str) -> Iterator[None]:
    """One line for whatever goes wrong with files."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, UnpicklingError, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause = next(iter(error.failures.values()))[0]
        said = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise InputError(f"{what}: {' '.join(said.split()) or type(cause).__name__}") from error


def _outcome(task: Callable[[], Any]) -> Any:
    try:
        return task()
    except (OSError, InputError) as error:
        return error


def _raised(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, OSError | InputError):
            raise outcome
    return outcomes


def _agreed(task: Callable[[], Any]) -> Any:
    """Every rank's own result, unless it has failed on one."""
    outcomes: list[Any] = [None] * dist.get_world_size()
    own = _outcome(task)
    dist.all_gather_object(outcomes, own if isinstance(own, OSError | InputError) else None)
    _raised(outcomes)
    return own


def _on_first(task: Callable[[], object]) -> None:
    """Rank 0 alone does it; the others wait."""
    _agreed(lambda: task() if dist.get_rank() == 0 else None)
