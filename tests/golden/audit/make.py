"""Writes the folders of this one: python make.py [NAME ..]; without names, all. See README.md for versions."""

import sys

import fsdp2
from settings import SETTINGS

if __name__ == "__main__":
    for setting in SETTINGS:
        if not sys.argv[1:] or setting.name in sys.argv[1:]:
            fsdp2.make(setting)
            print(setting.name, len(setting.cases), "cases", flush=True)
