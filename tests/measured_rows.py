"""CSV files of measured results for tests."""

import csv

from zsim import validation

MADE = {
    "id": "MADE-1",
    "source": "a laboratory",
    "verified": "yes",
    "system": "PyTorch FSDP",
    "model": "Llama2-7b",
    "layers": "4",
    "hidden": "1024",
    "heads": "16",
    "ffn": "2816",
    "vocab": "32000",
    "seq_len": "1024",
    "hardware": "A100-SXM-80GB",
    "gpus": "8",
    "gpus_per_node": "8",
    "precision": "bf16",
    "zero_stage": "3",
    "micro_batch": "2",
    "grad_accum": "1",
    "activation_checkpointing": "none",
    "metric": "tokens_per_s_per_gpu",
    "value": "50000",
}


def written(folder, *changes, name="results.csv"):
    """A CSV file of rows that differ from MADE in some cells."""
    path = folder / name
    made = [MADE | change for change in changes or ({},)]
    names = list(dict.fromkeys(column for row in made for column in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(made)
    return path


def case(folder, **change):
    """The one case of a row."""
    [found] = validation.cases([written(folder, change)])
    return found
