#!/usr/bin/env python3
"""Draws docs/architecture.svg: the crates, and which rests on which, as `cargo metadata` has it.

usage: python scripts/architecture.py      (at the root of the repository)

Arrows lead to what a crate rests on; those that follow from others are left out (a crate rests on all below its arrows).
"""

import html
import itertools
import json
import pathlib
import subprocess
import textwrap

PICTURE = pathlib.Path("docs/architecture.svg")
# Sizes of the picture and its boxes, and the width (STOP) of an arrow where it passes a row.
WIDTH, BOX, HEIGHT, GAP, MARGIN, STOP = 1060, 180, 98, 58, 10, 12
LETTERS = 27
# The same style as in the page of `fsdp report`.
STYLE = """
  svg { background: #ffffff; font: 11px system-ui, sans-serif; }
  rect { fill: #f7f8fa; stroke: #dfe3e8; }
  .name { fill: #1f6fb4; font-weight: 600; font-size: 14px; }
  .about { fill: #5f6670; }
  path { fill: none; stroke: #9aa3ad; }
  marker path { fill: #9aa3ad; stroke: none; }
"""


def crates():
    """What each published crate is, and on which it rests, without its tests."""
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1"]
    packages = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["packages"]
    packages = [package for package in packages if package["publish"] is None]
    names = {package["name"] for package in packages}
    normal = lambda one: {need["name"] for need in one["dependencies"] if need["kind"] is None} & names
    return {one["name"]: (one["description"], normal(one)) for one in packages}


def reduced(needs):
    """Without what follows from other needs."""
    below = lambda name: set().union(needs[name], *(below(other) for other in needs[name]))
    follows = lambda name: set().union(*(below(other) for other in needs[name]))
    return {name: needs[name] - follows(name) for name in needs}


def rows(needs):
    """Crates from below to above, each over all that it rests on; and arrows, with what they pass in the rows between."""
    level = {}
    measure = lambda name: level.setdefault(name, 1 + max(map(measure, needs[name]), default=-1))
    levels = [[] for _ in range(1 + max(map(measure, sorted(needs))))]
    arrows = []
    for name in sorted(needs):
        levels[level[name]].append(name)
        for other in sorted(needs[name]):
            passed = [(name, other, at) for at in range(level[name] - 1, level[other], -1)]
            arrows.append([name, *passed, other])
            for stop in passed:
                levels[stop[2]].append(stop)
    return levels, arrows


def placed(levels, arrows):
    """Where the middle of each crate, and of each stop of an arrow, is: near what it leads to."""
    below = {}
    for arrow in arrows:
        for above, under in itertools.pairwise(arrow):
            below.setdefault(above, []).append(under)
    middles = {}
    for row in levels:
        wish = {one: [middles[under] for under in below.get(one, [])] for one in row}
        row.sort(key=lambda one: (sum(wish[one]) / max(1, len(wish[one])), str(one)))
        widths = [BOX if isinstance(one, str) else STOP for one in row]
        space = (WIDTH - sum(widths)) / (len(row) + 1)
        for one, width, before in zip(row, widths, itertools.accumulate(widths, initial=0)):
            middles[one] = before + width / 2 + space * (1 + row.index(one))
    return middles


def box(name, about, x, y):
    lines = "".join(
        f'<text class="about" x="{x + 10:.0f}" y="{y + 38 + 13 * line:.0f}">{html.escape(text)}</text>'
        for line, text in enumerate(textwrap.wrap(about.rstrip("."), LETTERS))
    )
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX}" height="{HEIGHT}" rx="5"/>'
        f'<text class="name" x="{x + 10:.0f}" y="{y + 20:.0f}">{name}</text>{lines}'
    )


def curve(arrow, middles, top):
    path = f"M{middles[arrow[0]]:.0f} {top(arrow[0]) + HEIGHT:.0f}"
    for above, under in itertools.pairwise(arrow):
        start, end = top(above) + HEIGHT, top(under)
        bend, x, to = (end - start) / 2, middles[above], middles[under]
        path += f"C{x:.0f} {start + bend:.0f} {to:.0f} {end - bend:.0f} {to:.0f} {end - (under == arrow[-1]) * 2:.0f}"
        if under != arrow[-1]:
            path += f"V{end + HEIGHT:.0f}"
    return f'<path d="{path}" marker-end="url(#to)"/>'


def main():
    found = crates()
    levels, arrows = rows(reduced({name: needs for name, (_, needs) in found.items()}))
    middles = placed(levels, arrows)
    at = {one: index for index, row in enumerate(levels) for one in row}
    top = lambda one: MARGIN + (len(levels) - 1 - at[one]) * (HEIGHT + GAP)
    boxes = [box(name, about, middles[name] - BOX / 2, top(name)) for name, (about, _) in found.items()]
    height = 2 * MARGIN + len(levels) * (HEIGHT + GAP) - GAP
    marker = '<marker id="to" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    PICTURE.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">\n'
        f"<title>The crates, and which rests on which</title>\n<style>{STYLE}</style>\n"
        f'<defs>{marker}<path d="M0 0L6 3L0 6z"/></marker></defs>\n'
        f'<rect width="{WIDTH}" height="{height}" style="fill:#ffffff;stroke:none"/>\n'
        + "\n".join([curve(arrow, middles, top) for arrow in arrows] + boxes)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
