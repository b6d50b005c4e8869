#!/usr/bin/env python3
"""Checks every #include against the table in ARCHITECTURE.md: folders may only include what their row allows, and
foreign headers named in the last column are seen by that folder alone."""
import pathlib
import re
import sys

root = pathlib.Path(__file__).resolve().parents[2]


def table():
    text = (root / "ARCHITECTURE.md").read_text()
    body = text.split("<!-- includes:begin -->")[1].split("<!-- includes:end -->")[0]
    rows = {}
    for line in body.strip().splitlines()[2:]:
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        ticks = lambda cell: re.findall(r"`([^`]+)`", cell)
        rows[ticks(cells[0])[0]] = (set(ticks(cells[2])), ticks(cells[3]))
    return rows


def owner(path, folders):
    """The deepest folder of the table that holds path."""
    best = ""
    for folder in folders:
        if path.startswith(folder + "/") and len(folder) > len(best):
            best = folder
    return best


def main():
    rows = table()
    foreign = {header: folder for folder, (_, headers) in rows.items() for header in headers}
    problems, checked = [], 0
    sources = [p for d in ("services", "db", "trainer") for p in (root / d).rglob("*") if p.suffix in (".c", ".h", ".cc", ".cpp", ".cu")]
    for path in sources:
        name = str(path.relative_to(root))
        folder = owner(name, rows)
        if not folder:
            problems.append(f"{name}: its folder is missing in the table of ARCHITECTURE.md")
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            match = re.match(r'\s*#\s*include\s+[<"]([^>"]+)[>"]', line)
            if not match:
                continue
            checked += 1
            header = match.group(1)
            inside = owner(header, rows)
            if inside and inside != folder and inside not in rows[folder][0]:
                problems.append(f"{name}:{number}: {folder} may not include {inside}")
            for prefix, allowed in foreign.items():
                if (header == prefix or (prefix.endswith("/") and header.startswith(prefix))) and folder != allowed:
                    problems.append(f"{name}:{number}: only {allowed} may include <{header}>")
    seers = {str(p.relative_to(root)) for p in sources if "<microhttpd.h>" in p.read_text(errors="replace")}
    if len(seers) > 1:
        problems.append("microhttpd.h is included by more than one file: " + ", ".join(sorted(seers)))
    print("\n".join(problems) or f"{checked} includes in {len(sources)} files keep to the table")
    return 1 if problems or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
