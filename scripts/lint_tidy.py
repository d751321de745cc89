"""Runs clang-tidy on the C++ files that do not include gRPC or another library whose headers are slow.

A file that was clean is remembered by the content of all that it includes of ours, so a second run is quick.

usage: lint_tidy.py BUILD    (a build folder with compile_commands.json)
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
INCLUDE = re.compile(r'^\s*#include (?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
SLOW = re.compile(r"(grpc|google/protobuf|nanobind|yaml-cpp|CLI|nlohmann|spdlog)/|.*\.pb\.h$|Python\.h$|.*cuda")


def closure(path: pathlib.Path, seen: set[pathlib.Path]) -> bool:
    """Adds to `seen` the files of ours that `path` includes; False when it reaches a slow library."""
    if path in seen:
        return True
    seen.add(path)
    for ours, theirs in INCLUDE.findall(path.read_text()):
        if SLOW.match(ours or theirs):
            return False
        if ours and (ROOT / ours).is_file() and not closure(ROOT / ours, seen):
            return False
    return True


def tidy(build: pathlib.Path, file: pathlib.Path, stamp: pathlib.Path) -> str:
    done = subprocess.run(["clang-tidy", "-p", build, "--quiet", file], capture_output=True, text=True)
    if done.returncode == 0:
        stamp.touch()
        return ""
    return done.stdout or done.stderr


def main(build: pathlib.Path) -> int:
    stamps = build.parent / "lint"
    stamps.mkdir(parents=True, exist_ok=True)
    rules = (ROOT / ".clang-tidy").read_bytes() + (ROOT / "tests/.clang-tidy").read_bytes()
    jobs = []
    skipped = 0
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = pathlib.Path(entry["file"])
        if not file.is_relative_to(ROOT) or file.is_relative_to(ROOT / "build") or not file.is_file():
            continue
        included: set[pathlib.Path] = set()
        if file.suffix != ".cc" or not closure(file, included):
            skipped += 1
            continue
        key = hashlib.sha256(rules + entry["command"].encode())
        for header in sorted(included):
            key.update(header.read_bytes())
        stamp = stamps / key.hexdigest()[:24]
        if not stamp.exists():
            jobs.append((build, file, stamp))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [output for output in pool.map(lambda job: tidy(*job), jobs) if output]
    print("\n".join(found))
    print(f"{len(jobs)} files read, {len(found)} with findings, {skipped} that include slow libraries left out")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve()))
