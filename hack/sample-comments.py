#!/usr/bin/env python3
"""Prints Go doc comments picked at random, to compare the language of the code before and after a change.

    hack/sample-comments.py SEED [COUNT]          picks COUNT (10) documented declarations
    hack/sample-comments.py --at FILE:NAME ...    prints the comments of these declarations

The first form picks from the declarations of the tree in the working directory: the same seed and the same declarations give the
same sample. The line at its end is the command that prints the same declarations again, after they have changed.
"""

import random
import re
import subprocess
import sys

DECLARATION = re.compile(
    r"^(?:\t)?(?:func (?:\((?:\w+ )?\*?(?P<receiver>\w+)[^)]*\) )?|type |var |const )?(?P<name>\w+)"
)


def go_files():
    names = subprocess.run(["git", "ls-files", "*.go"], capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        with open(name, encoding="utf-8") as f:
            lines = f.read().split("\n")
        if not any(re.match(r"// Code generated .* DO NOT EDIT\.$", line) for line in lines[:40]):
            yield name, lines


def documented(lines):
    """Yields the name and the doc comment of each package, and of each declaration at the top level or in a group or struct."""
    comment, indent = [], None
    for line in lines:
        match = re.match(r"^(\t?)// ?(.*)$", line)
        if match:
            if match[1] != indent:
                comment, indent = [], match[1]
            if not re.match(r"^//(go:|nolint|\+)", line.strip()):
                comment.append(match[2])
            continue
        found = DECLARATION.match(line)
        if comment and found and line.startswith(indent) and not line.startswith(indent + "\t"):
            name = found["name"] if not found["receiver"] else found["receiver"] + "." + found["name"]
            if line.startswith("package "):
                name = "package"
            if indent == "" or comment[0].startswith(found["name"] + " "):
                yield name, " ".join(" ".join(comment).split())
        comment, indent = [], None


def main():
    declarations = {}
    for file, lines in go_files():
        for name, comment in documented(lines):
            declarations.setdefault(file + ":" + name, comment)
    if len(sys.argv) > 2 and sys.argv[1] == "--at":
        picked = sys.argv[2:]
    elif len(sys.argv) in (2, 3) and sys.argv[1].isdigit():
        count = int(sys.argv[2]) if len(sys.argv) == 3 else 10
        picked = random.Random(int(sys.argv[1])).sample(sorted(declarations), count)
        print(f"seed {sys.argv[1]}, {count} of {len(declarations)} documented declarations\n")
    else:
        sys.exit(__doc__)
    for place in picked:
        print(f"{place}\n    {declarations.get(place, '(no such declaration any more)')}\n")
    print("hack/sample-comments.py --at " + " ".join(picked))


main()
