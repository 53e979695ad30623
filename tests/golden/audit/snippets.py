"""The examples of docs/auditing.md and docs/auditing-reference.md, which the scripts run as they stand there."""

import re

import common

SNIPPET = re.compile(r"<!-- snippet: ([\w-]+) -->\n```python\n(.*?)```", re.S)


def run(name, scope):
    """Runs an example with the names of `scope`, and returns all names that there are then."""
    pages = sorted((common.HERE.parents[2] / "docs").glob("auditing*.md"))
    found = dict(example for page in pages for example in SNIPPET.findall(page.read_text()))
    exec(compile(found[name], name, "exec"), scope)
    return scope


save_batch = run("save-batch", {})["save_batch"]
