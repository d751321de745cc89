"""Reads every #include of the tree and fails on one that goes against arrows.py."""

import pathlib
import re
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from arrows import ARROWS, CONFINED, EXEMPT

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOP = ["base", "proto", "kernels", "server", "client", "python_client", "tests"]
SOURCES = {".h", ".cc", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def starts_with(path: str, prefix: str) -> bool:
    """`server/step` holds server/step/worker.h, and `server/session/types` holds server/session/types.h."""
    return path.startswith(prefix) and (len(path) == len(prefix) or path[len(prefix)] in "/.")


def node_of(path: str) -> str | None:
    return max((n for n in ARROWS if starts_with(path, n)), key=len, default=None)


def reachable(node: str) -> set[str]:
    seen, todo = set(), [node]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo += ARROWS.get(current, [])
    return seen


def violations(root: pathlib.Path) -> list[str]:
    """One line for each include that is not allowed."""
    found = []
    for file in sorted(p for top in TOP for p in (root / top).rglob("*") if p.suffix in SOURCES):
        path = file.relative_to(root).as_posix()
        if any(starts_with(path, e) for e in EXEMPT):
            continue
        node = node_of(path)
        if node is None:
            found.append(f"{path}: its folder has no entry in tests/layering/arrows.py")
            continue
        allowed = reachable(node)
        for _, header in INCLUDE.findall(file.read_text()):
            for pattern, places in CONFINED.items():
                if re.match(pattern, header) and not any(path.startswith(p) for p in places):
                    found.append(f"{path} includes {header}, which only {places or 'tests'} may")
            if header.startswith("dmuon/") and header.endswith(".pb.h"):
                target: str | None = "proto/dmuon"
            elif header.split("/")[0] in TOP and "/" in header:
                target = node_of(header)
            else:
                continue  # from outside
            if target not in allowed:
                found.append(f"{path} includes {header}: no arrow from {node} to {target or header}")
    return found


class Layering(unittest.TestCase):
    def test_every_include_follows_an_arrow(self) -> None:
        found = violations(ROOT)
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_arrows_have_no_cycle(self) -> None:
        for node, targets in ARROWS.items():
            for target in targets:
                self.assertNotIn(node, reachable(target), f"{node} -> {target} -> ... -> {node}")

    def test_the_architecture_page_draws_every_arrow(self) -> None:
        page = (ROOT / "docs/architecture.md").read_text()
        for node, targets in ARROWS.items():
            row = re.search(rf"^\| `{re.escape(node)}` \|(.*)$", page, re.MULTILINE)
            self.assertIsNotNone(row, f"docs/architecture.md has no row for {node}")
            drawn = re.findall(r"`([^`]+)`", row.group(1).split("|")[0]) if row else []
            self.assertEqual(sorted(drawn), sorted(targets), f"row of {node} in docs/architecture.md")

    def assert_caught(self, path: str, include: str, reason: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / path
            file.parent.mkdir(parents=True)
            file.write_text(f"#include {include}\n")
            found = violations(pathlib.Path(folder))
        self.assertEqual(len(found), 1, found)
        self.assertIn(reason, found[0])

    def test_a_planted_include_is_caught(self) -> None:
        self.assert_caught("kernels/cpu/bad.cc", '"server/step/step.h"', "no arrow from kernels to server/step")
        self.assert_caught("client/bad.cc", '"server/session/types.h"', "no arrow from client")
        self.assert_caught("server/step/bad.cc", "<grpcpp/grpcpp.h>", "only")
        self.assert_caught("server/memory/bad.cc", "<nccl.h>", "only")
        self.assert_caught("server/new_folder/bad.cc", '"base/log.h"', "no entry")

    def test_a_generated_header_is_caught_in_the_domain(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "server/session/bad.cc"
            file.parent.mkdir(parents=True)
            file.write_text('#include "dmuon/v1/types.pb.h"\n')
            found = "\n".join(violations(pathlib.Path(folder)))
        self.assertIn("only", found)
        self.assertIn("no arrow from server/session to proto/dmuon", found)


if __name__ == "__main__":
    unittest.main()
