#!/usr/bin/env python3
"""A preprocessor of mdBook: links that leave docs/ lead to the repository.

Its address is `output.html.git-repository-url` of book.toml, or MDBOOK_OUTPUT__HTML__GIT_REPOSITORY_URL; without one, such links become
plain text. Links in blocks of code are not recognized, and there are none.
"""
import json
import re
import sys

LINK = re.compile(r"\[([^\]\[]*(?:\[[^\]]*\])?[^\]\[]*)\]\(\.\./([^)]*)\)")


def rewrite(items, url):
    for item in items:
        if chapter := isinstance(item, dict) and item.get("Chapter"):
            target = rf"[\1]({url}/blob/HEAD/\2)" if url else r"\1"
            chapter["content"] = LINK.sub(target, chapter["content"])
            rewrite(chapter["sub_items"], url)


if sys.argv[1:2] == ["supports"]:
    sys.exit(sys.argv[2:] != ["html"])
context, book = json.load(sys.stdin)
rewrite(book["items"], context["config"]["output"]["html"].get("git-repository-url"))
json.dump(book, sys.stdout)
