"""Compares the metrics of a run with the log of transformers' Trainer or of TRL, and names the first step that differs.

    python scripts/compare_with_trainer.py runs/mine trainer-output

RUN is the output folder of `fsdp train` or its metrics.jsonl. TRAINER is a `trainer_state.json`, a folder with one, or a
folder with checkpoints of the Trainer, of which the last one counts. Needs only Python's standard library (3.8 or later).

Compared are, at every step that the Trainer logged: the tokens since its previous log, the learning rate, the mean loss
since its previous log, and the gradient norm of the step. docs/training.md says how to set up a run with the Trainer's
curve. Exit code 0: the same within the bounds; 1: something differs; 2: the files cannot be compared.
"""

import argparse
import json
import math
import pathlib
import re
import sys

# Decimals to which older versions of transformers rounded losses before they logged them.
ROUNDED = 4
# Names of the Trainer's count of tokens since its beginning; the second is TRL's.
TOKENS = ["num_input_tokens_seen", "num_tokens"]
STATE = "trainer_state.json"


class InputError(Exception):
    pass


# The two files


def load(path, parse):
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {error}") from None


def read_run(path):
    """The steps of a run by number, and the samples of a step (None if they are not known)."""
    path = pathlib.Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    lines = load(file, lambda text: [json.loads(line) for line in text.splitlines() if line.strip()])
    steps = {}
    for line in lines:
        if not isinstance(line, dict):
            raise InputError(f"{file}: a line is not an object, so this is not the metrics.jsonl of a run")
        if "loss" not in line or "step" not in line:
            continue
        if line["step"] in steps:
            raise InputError(f"{file}: step {line['step']} is there twice")
        steps[line["step"]] = line
    if not steps:
        raise InputError(f"{file}: has no steps")
    resolved = file.parent / "resolved.toml"
    samples = re.search(r"^global_batch_size = (\d+)$", resolved.read_text(), re.M) if resolved.is_file() else None
    return steps, samples and int(samples[1])


def find_state(path):
    path = pathlib.Path(path)
    if not path.is_dir():
        return path
    if (path / STATE).is_file():
        return path / STATE
    numbers = [(int(one.parent.name.rsplit("-", 1)[-1]), one) for one in path.glob(f"checkpoint-[0-9]*/{STATE}")]
    if not numbers:
        raise InputError(f"{path}: has no {STATE}, and no folder checkpoint-N has one; Trainer.save_state writes it")
    return max(numbers)[1]


def read_trainer(path):
    """The logs of training by step; what was logged at one step in parts is one log."""
    file = find_state(path)
    state = load(file, json.loads)
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise InputError(f"{file}: has no `log_history`, so it is not the {STATE} of a Trainer")
    logs = {}
    for entry in history:
        if "loss" in entry and isinstance(entry.get("step"), int):
            logs.setdefault(entry["step"], {}).update(entry)
    if not logs:
        raise InputError(f"{file}: no loss was logged; set logging_steps below the number of steps")
    return dict(sorted(logs.items()))


# Comparing


def number(value):
    """A logged value as a float; what is missing or not finite is NaN, as in metrics.jsonl."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else math.nan


def is_near(ours, theirs, relative, absolute=0.0):
    if math.isnan(ours) or math.isnan(theirs):
        return math.isnan(ours) and math.isnan(theirs)
    return abs(ours - theirs) <= absolute + relative * max(abs(ours), abs(theirs))


class Column:
    """One kind of value: pairs by step, and the first of them that differs."""

    def __init__(self, name, note=""):
        self.name, self.note, self.pairs, self.same, self.first, self.most = name, note, 0, 0, None, 0.0
        self.hint = None

    def add(self, step, ours, theirs, is_same):
        self.pairs += 1
        self.same += is_same
        if not is_same and self.first is None:
            self.first = (step, ours, theirs)
        if ours != theirs and not (math.isnan(ours) or math.isnan(theirs)):
            self.most = max(self.most, abs(ours - theirs) / max(abs(ours), abs(theirs)))

    def rank(self):
        """Orders readings of the same values: the best differs last, and seldom."""
        return (math.inf if self.first is None else self.first[0], self.same)


def windows(logs, steps, resumed):
    """For each log, the steps that it sums up: those since the log before, or since the Trainer was resumed."""
    before = 0
    for step, log in logs.items():
        first = max([before] + [start for start in resumed if start < step]) + 1
        window = [steps.get(one) for one in range(first, step + 1)]
        yield step, log, before, window if all(window) else None
        before = step


def tokens(logs, steps, samples, resumed):
    """The Trainer counts whole samples, of which the first token is not a target and the last is not an input."""
    key = next((key for key in TOKENS if any(key in log for log in logs.values())), None)
    if key is None:
        return None
    readings = []
    for column in ["tokens", "targets"]:
        for extra in [0, samples] if samples else [0]:
            note = f"the Trainer's `{key}` against `{column}`" + (", and one token more for each sample" if extra else "")
            reading = Column("tokens", note)
            previous = 0
            for step, log, before, _ in windows(logs, steps, resumed):
                theirs = number(log.get(key))
                if theirs < previous:  # TRL counts from zero when it is resumed.
                    previous, before = 0, max([start for start in resumed if start < step], default=before)
                window = [steps.get(one) for one in range(before + 1, step + 1)]
                if all(window):
                    ours = float(sum(one[column] + extra for one in window))
                    reading.add(step, ours, theirs - previous, ours == theirs - previous)
                previous = theirs
            readings.append(reading)
    return max(readings, key=Column.rank)


def rates(logs, steps, bound):
    """Older versions of the Trainer logged the rate of the step to come."""
    if not any("learning_rate" in log for log in logs.values()):
        return None
    peak = max(abs(number(one.get("lr"))) for one in steps.values())
    readings = [Column("learning rate"), Column("learning rate", "the Trainer logged the rate of the next step")]
    for ahead, reading in enumerate(readings):
        for step, log in logs.items():
            if step in steps and step + ahead in steps and "learning_rate" in log:
                ours, theirs = number(steps[step + ahead].get("lr")), number(log["learning_rate"])
                reading.add(step, ours, theirs, is_near(ours, theirs, bound, 1e-9 * peak))
    # Both readings of a constant rate are right.
    return max(readings, key=lambda one: (one.rank()[0], one is readings[0]))


def losses(logs, steps, bound, resumed):
    """The mean over steps, as the Trainer logs it."""
    values = [number(log["loss"]) for log in logs.values()]
    is_rounded = all(value == round(value, ROUNDED) for value in values if not math.isnan(value))
    column = Column("loss", f"the Trainer rounded to {ROUNDED} decimals" if is_rounded else "")
    absolute = 0.5001 * 10**-ROUNDED if is_rounded else 0.0
    for step, log, _, window in windows(logs, steps, resumed):
        if window:
            ours, theirs = sum(number(one["loss"]) for one in window) / len(window), number(log["loss"])
            is_same = is_near(ours, theirs, bound, absolute)
            if not is_same and column.first is None:
                column.hint = hint(step, window, lambda ours: is_near(ours, theirs, bound, absolute))
            column.add(step, ours, theirs, is_same)
    return column


def hint(step, window, agrees):
    """Whether the Trainer may have been resumed in a window whose loss differs."""
    for count in range(len(window) - 1, 0, -1):
        if agrees(sum(number(one["loss"]) for one in window[-count:]) / count):
            return f"the mean since step {step - count + 1} is the same: --resumed-after {step - count}, if it was"
    return None


def norms(logs, steps, bound):
    if not any("grad_norm" in log for log in logs.values()):
        return None
    column = Column("gradient norm")
    for step, log in logs.items():
        if step in steps and "grad_norm" in log:
            ours, theirs = number(steps[step].get("grad_norm")), number(log["grad_norm"])
            column.add(step, ours, theirs, is_near(ours, theirs, bound))
    return column


def counts_others(counts, means):
    """Whether the Trainer counts other tokens: none of its counts is ours, and yet all losses are the same."""
    is_known = counts is None or counts.pairs == 0 or counts.same > 0
    return not is_known and means.pairs > 0 and means.first is None


def report(columns, logs, steps):
    """Prints what was compared, and returns whether it is the same."""
    columns = dict((name, (column, bound)) for name, column, bound in columns)
    counts, means = columns["tokens"][0], columns["loss"][0]
    if counts_others(counts, means):
        step, ours, theirs = counts.first
        why = f"not compared: the Trainer counts other tokens, such as those of prompts but not of padding ({theirs:.9g} at"
        print(f"{'tokens':14} {why} its first log, step {step}, where this run has {ours:.9g})")
        del columns["tokens"]
    columns = [(name, *column) for name, column in columns.items()]
    for name, column, bound in columns:
        if column is None or column.pairs == 0:
            why = "not compared" if column is None else "no step of the Trainer's log can be compared"
            print(f"{name:14} {why}")
            continue
        note = f"; {column.note}" if column.note else ""
        limit = f", bound {bound:.0e}" if bound else ""
        verdict = "differs" if column.first else "same"
        print(f"{name:14} {verdict}, {column.pairs} values, largest difference {column.most:.1e}{limit}{note}")
    compared = [column for _, column, _ in columns if column and column.pairs]
    if not compared:
        ours, theirs = f"{min(steps)} to {max(steps)}", f"{min(logs)} to {max(logs)}"
        raise InputError(f"no value can be compared: the run has steps {ours}, the Trainer logged {theirs}")
    # Of one step, the cause comes before its effects.
    differing = [column for column in compared if column.first]
    if not differing:
        return True
    first = min(differing, key=lambda column: column.first[0])
    step, ours, theirs = first.first
    if first is counts and means.first is None:
        first.hint = "losses are the same; --no-tokens leaves out counts that padding may change"
    print(f"first difference: {first.name} of step {step}, {ours:.9g} here and {theirs:.9g} in the Trainer's log")
    if first.hint:
        print(f"hint: {first.hint}")
    return False


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", metavar="RUN", help="output folder of a run, or its metrics.jsonl")
    parser.add_argument("trainer", metavar="TRAINER", help="trainer_state.json, or a folder that has one")
    parser.add_argument("--rate", type=float, default=1e-6, help="relative bound of learning rates (%(default)s)")
    parser.add_argument("--loss", type=float, default=1e-4, help="relative bound of losses (%(default)s)")
    parser.add_argument("--norm", type=float, default=3e-4, help="relative bound of gradient norms (%(default)s)")
    parser.add_argument(
        "--resumed-after",
        type=int,
        action="append",
        default=[],
        metavar="STEP",
        help="the Trainer was resumed after this step: it forgets the losses since its log before (may be repeated)",
    )
    parser.add_argument(
        "--no-tokens",
        action="store_true",
        help="compare no counts of tokens: those of padded samples need not be the same",
    )
    return parser.parse_args()


def main():
    args = arguments()
    try:
        (steps, samples), logs = read_run(args.run), read_trainer(args.trainer)
        columns = [
            ("tokens", None if args.no_tokens else tokens(logs, steps, samples, args.resumed_after), None),
            ("learning rate", rates(logs, steps, args.rate), args.rate),
            ("loss", losses(logs, steps, args.loss, args.resumed_after), args.loss),
            ("gradient norm", norms(logs, steps, args.norm), args.norm),
        ]
        is_same = report(columns, logs, steps)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
