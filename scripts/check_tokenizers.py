#!/usr/bin/env python3
"""Does `fsdp` give the ids of transformers' AutoTokenizer?

usage: python scripts/check_tokenizers.py LOGITS FOLDER .. [--text FILE ..]      (transformers 5.17)

LOGITS is the built example `logits` of fsdp-train with the feature `tokenizers`. Each FOLDER has a `tokenizer.json` and what
belongs to it (`tokenizer_config.json`, `added_tokens.json`, `config.json`). Every line of the text files, by default those of
this repository's documentation, and every special token between words, is tokenized by both. Prints the first text of each
tokenizer whose ids differ, and fails if there is one.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from transformers import AutoTokenizer

ROOT = pathlib.Path(__file__).parent.parent


def texts_of(files, tokenizer):
    lines = [line for file in files for line in pathlib.Path(file).read_text().splitlines()]
    added = tokenizer.get_added_vocab()
    around = [text for token in added for text in (f"a{token}b", f"a  {token}  b", f" {token}\n{token}")]
    odd = [" leading", "  two  spaces ", "tab\tnew\n\n\nline", "cafe\u0301 \u00a0\u2009\u200b", "\U0001f600\u4e2d\u6587", "it's 12345", ""]
    return lines + around + odd + ["\n".join(lines)]


def is_same(program, folder, files):
    theirs = AutoTokenizer.from_pretrained(folder)
    texts = texts_of(files, theirs)
    command = [program, "--tokens", pathlib.Path(folder) / "tokenizer.json"]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{folder}: refused: {done.stderr.strip()}")
        return False
    for text, ours in zip(texts, json.loads(done.stdout), strict=True):
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        if ours != expected:
            print(f"{folder}: {text[:200]!r}: {ours[:50]}, transformers: {expected[:50]}")
            return False
    print(f"{folder}: {type(theirs).__name__}: {len(texts)} texts have the same ids")
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--text", nargs="+", default=sorted((ROOT / "docs").glob("*.md")))
    args = parser.parse_args()
    results = [is_same(args.program, folder, args.text) for folder in args.folders]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
