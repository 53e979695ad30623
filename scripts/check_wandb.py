#!/usr/bin/env python3
"""Sends the metrics of a run to wandb, offline, and compares what wandb has written with the run's `metrics.jsonl`.

usage: python scripts/check_wandb.py RUN_DIR      (wandb 0.31)
"""

import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

from wandb.proto import wandb_internal_pb2

EXAMPLE = pathlib.Path(__file__).resolve().parent.parent / "examples/to_wandb.py"
# A file is a header, then blocks that hold pieces of records, as in LevelDB's logs.
HEADER, BLOCK, PIECE = 7, 32768, struct.Struct("<IHB")
FULL, LAST = 1, 4


def records(data):
    position, record = HEADER, b""
    while position + PIECE.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < PIECE.size:
            position += left
            continue
        _checksum, length, kind = PIECE.unpack_from(data, position)
        position += PIECE.size + length
        record += data[position - length : position]
        if kind in (FULL, LAST):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def steps(file):
    """What a run has logged, by step."""
    logged = {}
    for record in records(file.read_bytes()):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            logged[items["_step"]] = {key: value for key, value in items.items() if not key.startswith("_")}
    return logged


run_dir = pathlib.Path(sys.argv[1]).resolve()
expected = {}
for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
    if "loss" in row:
        numbers = {f"train/{key}": value for key, value in row.items() if isinstance(value, (int, float))}
        expected.setdefault(row["step"], {}).update(numbers)
    elif "set" in row:
        evaluation = {f"{key}/{row['set']}": row[key] for key in ("eval_loss", "eval_perplexity", "eval_tokens")}
        expected.setdefault(row["step"], {}).update(evaluation)
with tempfile.TemporaryDirectory() as folder:
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    with open(run_dir / "metrics.jsonl") as metrics:
        subprocess.run([sys.executable, EXAMPLE, run_dir], stdin=metrics, cwd=folder, env=environment, check=True)
    (file,) = pathlib.Path(folder).glob("wandb/offline-run-*/run-*.wandb")
    assert steps(file) == expected, "wandb has logged other figures"
print(f"{len(expected)} steps, {sum(map(len, expected.values()))} figures")
