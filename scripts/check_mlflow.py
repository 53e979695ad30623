"""Compares the runs of MLflow that a run has written (run.metrics = ["mlflow"]) with its metrics.jsonl, as MLflow itself reads them.

    pip install mlflow-skinny==3.17.2
    target/release/fsdp train examples/quickstart.toml --set 'run.metrics=["mlflow"]'
    python scripts/check_mlflow.py runs/quickstart
"""

import json
import os
import sys

# Since version 3, MLflow reads file stores only with this variable.
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"

from mlflow.tracking import MlflowClient  # noqa: E402


def expected(run):
    """(metric, step) -> value"""
    values = {}
    with open(os.path.join(run, "metrics.jsonl")) as file:
        for line in map(json.loads, file):
            step, name = line.pop("step", None), line.pop("set", None)
            if step is None:
                continue
            for key, value in line.items():
                if isinstance(value, (int, float)):
                    values[f"{key}/{name}" if name else key, step] = value
    return values


def found(run):
    client = MlflowClient(tracking_uri=f"file:{os.path.abspath(run)}/mlruns")
    values, status, params = [], [], 0
    for experiment in client.search_experiments():
        for each in client.search_runs([experiment.experiment_id]):
            status.append(each.info.status)
            params += len(each.data.params)
            for metric in each.data.metrics:
                history = client.get_metric_history(each.info.run_id, metric)
                values += [(metric, entry.step, entry.value) for entry in history]
    return values, status, params


def main():
    run = sys.argv[1]
    ours = expected(run)
    theirs, status, params = found(run)
    places = [(metric, step) for metric, step, _ in theirs]
    if len(set(places)) < len(places):
        sys.exit("a step is there twice")
    if set(places) != set(ours):
        sys.exit(f"steps differ: {sorted(set(places) ^ set(ours))[:10]}")
    for metric, step, value in theirs:
        if ours[metric, step] != value:
            sys.exit(f"{metric} at step {step}: {ours[metric, step]} was written, {value} is read")
    if params == 0 or any(each != "FINISHED" for each in status):
        sys.exit(f"{params} parameters, runs that are {status}")
    print(f"{len(places)} values of {len({metric for metric, _ in places})} metrics are equal; {params} parameters")


if __name__ == "__main__":
    main()
