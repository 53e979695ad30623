"""Sends the metrics of a run to Weights & Biases (pip install wandb):

    python examples/to_wandb.py runs/quickstart < runs/quickstart/metrics.jsonl
    tail -n +1 -f --pid=PID runs/quickstart/metrics.jsonl | python examples/to_wandb.py runs/quickstart     (while process PID trains)
"""

import json
import pathlib
import sys
import tomllib

import wandb

folder = pathlib.Path(sys.argv[1])
config = tomllib.loads((folder / "resolved.toml").read_text())
with wandb.init(project="fsdp", name=folder.name, config=config) as run:
    for line in sys.stdin:
        row = json.loads(line)
        if "loss" in row:
            # Lists (tokens of each expert) and figures that are not finite are left out.
            run.log({f"train/{key}": row[key] for key in row if isinstance(row[key], (int, float))}, step=row["step"])
        elif "set" in row:
            figures = ("eval_loss", "eval_perplexity", "eval_tokens")
            run.log({f"{key}/{row['set']}": row[key] for key in figures}, step=row["step"])
