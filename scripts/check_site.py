#!/usr/bin/env python3
"""Checks that every link, picture and anchor on the pages of a built site is on the site.

usage: python scripts/check_site.py target/site
"""
import html.parser
import pathlib
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    """The anchors of a page, and what it links to."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links = {""}, []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.anchors.add(value)
            elif name in ("href", "src") and value and tag != "base":
                self.links.append(value)


site = pathlib.Path(sys.argv[1]).resolve()
pages = {path: Page(path) for path in site.rglob("*.html")}
faults, seen = [], 0
for path, page in pages.items():
    for link in page.links:
        url = urllib.parse.urlsplit(link)
        if url.scheme or url.netloc:
            continue
        seen += 1
        target = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
        # 404.html has absolute links, since any address may show it.
        target = site / url.path.lstrip("/") if url.path.startswith("/") else target
        target = target / "index.html" if target.is_dir() else target
        if not target.is_file() or site not in target.parents:
            faults.append(f"{path.relative_to(site)}: {link}")
        elif target in pages and urllib.parse.unquote(url.fragment) not in pages[target].anchors:
            faults.append(f"{path.relative_to(site)}: no anchor {link}")
if faults or seen < 500:
    sys.exit("\n".join([f"{len(faults)} of {seen} links lead nowhere", *faults]))
print(f"{len(pages)} pages, {seen} links")
