#!/usr/bin/env python3
"""Makes pictures of the documentation: parts of the pages that `fsdp report` and `fsdp plan --report` write.

usage: python scripts/pictures.py FSDP [--chromium chromium] [--steps 120]      (torch 2.11, transformers 5.17)

docs/loss.png: a Llama of the sizes of examples/llama-tiny, with weights from transformers, trained on the same batches by
`fsdp train` over 4 ranks and by PyTorch alone; both curves are drawn by `fsdp report`. docs/timeline.png: the timeline of a step,
by `fsdp plan --report`. docs/memory.png: memory by category, by `fsdp report`. docs/architecture.svg: the crates, by
scripts/architecture.py. FSDP is the built program; run it at the root of the repository.
"""

import argparse
import json
import pathlib
import re
import subprocess
import tempfile

import architecture
import numpy
import torch
from transformers import AutoConfig, AutoModelForCausalLM

DOCS = pathlib.Path("docs")
SEQ_LEN, BATCH, WARMUP, LR = 128, 16, 20, 3e-3


def texts(folder):
    """The text that is learned, as one file."""
    paths = [pathlib.Path("README.md"), *sorted(pathlib.Path("crates").glob("*/src/**/*.rs"))]
    file = folder / "text.txt"
    file.write_bytes(b"".join(path.read_bytes() for path in paths))
    return file


def train(fsdp, folder, model, data, steps):
    """Trains with `fsdp`, over 4 ranks."""
    file = folder / "run.toml"
    file.write_text(
        f"""
        model = {{ path = "{model}", init = "pretrained" }}
        data = {{ train = ["{data}"], format = "text", tokenizer = "bytes", seq_len = {SEQ_LEN}, shuffle = false }}
        fsdp = {{ wrap = ["LlamaDecoderLayer"] }}
        run = {{ ranks = 4, out_dir = "{folder / "fsdp, 4 ranks"}" }}
        [train]
        steps = {steps}
        micro_batch_size = 2
        global_batch_size = {BATCH}
        grad_clip = 1.0
        optimizer = {{ name = "adamw", lr = {LR}, betas = [0.9, 0.95], eps = 1e-8, weight_decay = 0.1 }}
        lr_schedule = {{ name = "constant" }}
        """
    )
    subprocess.run([fsdp, "train", file, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return folder / "fsdp, 4 ranks"


def train_with_torch(folder, model, data, steps):
    """The same training, with PyTorch alone."""
    tokens = torch.from_numpy(numpy.fromfile(data, dtype="u1", count=steps * BATCH * SEQ_LEN + 1).astype("int64"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    out = folder / "PyTorch"
    out.mkdir()
    with open(out / "metrics.jsonl", "w") as lines:
        for step in range(steps):
            part = tokens[step * BATCH * SEQ_LEN : (step + 1) * BATCH * SEQ_LEN + 1]
            inputs, targets = part[:-1].reshape(BATCH, SEQ_LEN), part[1:].reshape(BATCH, SEQ_LEN)
            logits = model(inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            line = {"step": step + 1, "loss": loss.item(), "grad_norm": norm.item(), "lr": LR}
            lines.write(json.dumps(line) + "\n")
    return out


def losses(out):
    with open(out / "metrics.jsonl") as lines:
        return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def shoot(chromium, page, wanted, picture, size):
    """A picture of the figures of a page that have these words in their titles."""
    html = page.read_text()
    head = html[: html.index("<body")]
    figures = re.findall(r"<figure.*?</figure>", html, re.DOTALL)
    chosen = [figure for figure in figures if any(title in figure for title in wanted)]
    assert len(chosen) == len(wanted), f"{page} has not one figure for each of {wanted}"
    part = page.with_suffix(".part.html")
    part.write_text(f'{head}<body><div class="charts">{"".join(chosen)}</div></body></html>')
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size={size[0]},{size[1]}", f"--screenshot={picture.resolve()}", f"file://{part}"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fsdp")
    parser.add_argument("--chromium", default="chromium")
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    fsdp, chromium = str(pathlib.Path(arguments.fsdp).resolve()), arguments.chromium
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("examples/llama-tiny")).float()
        model.save_pretrained(folder / "model")
        data = texts(folder)
        ours = train(fsdp, folder, folder / "model", data, arguments.steps)
        theirs = train_with_torch(folder, model, data, arguments.steps)
        apart = [abs(a - b) / b for a, b in zip(losses(ours), losses(theirs), strict=True)]
        print(f"losses are at most {max(apart):.1e} apart, in the first 20 steps {max(apart[:20]):.1e}")
        page = folder / "report.html"
        # The report names runs by the paths it is given.
        report = [fsdp, "report", theirs.name, ours.name, "--output", page]
        subprocess.run(report, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        shoot(chromium, page, ["Training loss"], DOCS / "loss.png", (640, 345))
        shoot(chromium, page, ["Memory of rank 0"], DOCS / "memory.png", (640, 335))
        page = folder / "plan.html"
        plan = [fsdp, "plan", "examples/llama-8b.toml", "--on", "h100-sxm", "--nodes", "8", "--report", page]
        subprocess.run(plan, check=True, stdout=subprocess.DEVNULL)
        shoot(chromium, page, ["all of it"], DOCS / "timeline.png", (1000, 420))
    architecture.main()


if __name__ == "__main__":
    main()
