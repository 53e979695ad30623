"""Writes examples/handbook, a data set as Hugging Face lays it out, from the paragraphs of this repository's documentation.

    pip install pyarrow==26.0.1
    python scripts/example_dataset.py
"""

import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ["README.md", "ARCHITECTURE.md", "docs/numerics.md", "docs/reliability.md", "docs/clusters.md"]

rows = [
    {"page": page, "text": paragraph.strip()}
    for page in PAGES
    for paragraph in (ROOT / page).read_text().split("\n\n")
    if len(paragraph) > 200
]
out = ROOT / "examples/handbook/data"
out.mkdir(parents=True, exist_ok=True)
for split, part in {"train": rows[: -len(rows) // 10], "validation": rows[-len(rows) // 10 :]}.items():
    pq.write_table(pa.Table.from_pylist(part), out / f"{split}-00000-of-00001.parquet", compression="zstd", row_group_size=64)
