"""The rules of this tree that no packaged tool knows. Prints what breaks one, a line each; exit 1 if anything does.

usage: lint_tree.py FILE ...    (all files of the tree, relative to its root)
"""

import collections
import pathlib
import re
import sys

SOURCES = {".h", ".cc", ".cu", ".cuh", ".py", ".proto"}
MAX_COLUMNS = 132  # of comments; clang-format and ruff break the code itself
MAX_LINES = 500
# Files that are longer, each with its reason.
LONG_FILES: dict[str, str] = {
}

# Where a test may sleep, each with its reason.
SLEEPS = {
    "tests/support/process.cc": "polls what another process does, in one place for all",
    "tests/python/test_private_daemon.py": "polls for the end of a daemon that is nobody's child",
    "tests/benchmark/ns.py": "lets the threads of the one measured before stop spinning",
}

# Identical lines that make two places one too many. Tests may spell out what they expect.
DUPLICATE_LINES = 12

# What a reader meets in code, flags, logs and messages; docs/glossary.md says what each means.
VOCABULARY = """
    trainer session attachment slot worker mesh replicate shard tp parameter region block route placement owner boundary
    arena `GRAD` `WEIGHT` control~page generation micro master~weights momentum~buffer step step~id version epoch
    publication backend snapshot drain muon adamw sharded_adamw
    `GRADS_READY` `PREPARE` `STEP` `DISCARD` `MATERIALIZE` `RELEASE`
    `grads_consumed` `weights_version` `window_grant` `verdict` `done_step`
    ring record presence doorbell token pidfd window Z2 Z3 plan group digest incarnation coordinator imbalance
    lower~bound roll-forward commit direct gram restart coefficient~set
"""

# Fields whose name and message say all there is to say.
OBVIOUS_FIELDS = """
    name version pid threads sessions draining rank step session_id parameters boundaries placement loads imbalance
    groups mesh route shape owner boundary job session summary steps record reason states state alive attached uid
    world_size socket_dir attachments reshard_after_forward follow grad_bytes weight_bytes control_bytes state_bytes
    workspace_bytes staging_bytes nesterov adjust_lr nonfinite newton_schulz buffers outcome kind parameter form
    table_digest
    clip_coefficient reduce_seconds verdict_seconds publish_seconds newton_schulz_calls bytes row_begin row_end chunk
    restarts_given started_unix_seconds lower_bound sessions_left grad_offset weight_offset states_written
"""


def text_rules(path: str, lines: list[str]) -> list[str]:
    found = []
    suffix = pathlib.PurePath(path).suffix
    unfinished = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
    sleep = re.compile(r"\b(sleep_for|SleepFor|usleep|time\.sleep)\b")
    for number, line in enumerate(lines, 1):
        if unfinished.search(line):
            found.append(f"{path}:{number}: unfinished by its own word: {line.strip()}")
        if path.startswith("tests/") and path not in SLEEPS and sleep.search(line):
            found.append(f"{path}:{number}: a sleep in a test; wait for the event")
        if suffix in SOURCES and len(line) > MAX_COLUMNS:
            found.append(f"{path}:{number}: {len(line)} columns, at most {MAX_COLUMNS}")
        if line != line.rstrip():
            found.append(f"{path}:{number}: white space at the end of the line")
    if suffix in SOURCES and len(lines) > MAX_LINES and path not in LONG_FILES:
        found.append(f"{path}: {len(lines)} lines; split it by concept, or give the reason in {sys.argv[0]}")
    return found


def guard_rule(path: str, text: str) -> list[str]:
    guard = "DMUON_" + re.sub(r"[^A-Z0-9]", "_", path.replace("/src/", "/").upper()) + "_"
    if f"#ifndef {guard}\n#define {guard}\n" in text and text.endswith(f"#endif  // {guard}\n"):
        return []
    return [f"{path}: the include guard is not {guard}"]


def proto_rules(path: str, lines: list[str]) -> list[str]:
    found = []
    enum = None
    requests: collections.Counter[str] = collections.Counter()
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if m := re.match(r"enum (\w+)", line):
            enum = m[1]
            zero = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum).upper() + "_UNSPECIFIED = 0;"
            if zero not in lines[number]:
                found.append(f"{where}: the first value of {enum} must be {zero}")
        elif line.startswith("message"):
            enum = None
        if m := re.match(r"\s*rpc (\w+)\((?:stream )?(\w+)\) returns \((?:stream )?(\w+)\)", line):
            requests[m[2]] += 1
            if m[2] != m[1] + "Request" or requests[m[2]] > 1:
                found.append(f"{where}: rpc {m[1]} needs its own {m[1]}Request")
        field = re.match(r"\s*(?:message \w+ \{ )?(?:repeated |optional )?[\w.]+ (\w+) = \d+;(.*)", line)
        if field and enum is None and "//" not in field[2] and not lines[number - 2].strip().startswith("//") \
                and field[1] not in OBVIOUS_FIELDS.split():
            found.append(f"{where}: field {field[1]} has no comment with unit and default")
    return found


def duplicate_rule(files: dict[str, list[str]]) -> list[str]:
    """Runs of DUPLICATE_LINES lines of code that stand in two places."""
    seen: dict[tuple[str, ...], tuple[str, int]] = {}
    found = []
    for path, lines in files.items():
        code = [(n, s) for n, line in enumerate(lines, 1) if (s := line.strip())
                and not re.match(r"//|#include|#\s|import |from |\.\w+ = |[\W_]*$", s)]
        last_reported = 0
        for i in range(len(code) - DUPLICATE_LINES + 1):
            run = code[i : i + DUPLICATE_LINES]
            key = tuple(s for _, s in run)
            first = seen.setdefault(key, (path, run[0][0]))
            if first != (path, run[0][0]) and run[0][0] > last_reported:
                found.append(f"{path}:{run[0][0]}-{run[-1][0]} stands also at {first[0]}:{first[1]}")
                last_reported = run[-1][0]
    return found


def glossary_rule(glossary: str) -> list[str]:
    words = re.findall(r"^\| ([^|]+?) \|", glossary, re.MULTILINE)
    defined = {w.strip().lower() for cell in words for w in cell.replace("`", "").split(",")}
    wanted = [w.replace("~", " ").replace("`", "") for w in VOCABULARY.split()]
    return [f"docs/glossary.md: does not say what '{w}' is" for w in wanted if w.lower() not in defined]


def invariant_rule(page: str, tests: str) -> list[str]:
    """Every test that docs/architecture.md names for an invariant exists."""
    found = []
    for suite, name in re.findall(r"`([A-Z]\w+)\.([A-Z]\w+)`", page):
        if not re.search(rf"\bTEST(?:_F|_P)?\(\s*{suite},\s*{name}\s*\)", tests):
            found.append(f"docs/architecture.md: there is no test {suite}.{name}")
    for module, name in re.findall(r"`(test_\w+\.py)::(\w+)`", page):
        if f"def {name}(" not in tests:
            found.append(f"docs/architecture.md: there is no test {module}::{name}")
    unnamed = re.findall(r"^\| (\d+) \|[^|]*\|\s*\|$", page, re.MULTILINE)
    return found + [f"docs/architecture.md: invariant {number} names no test" for number in unnamed]


def main(paths: list[str]) -> int:
    found: list[str] = []
    code: dict[str, list[str]] = {}
    tests = ""
    for path in sorted(paths):
        try:
            text = pathlib.Path(path).read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        lines = text.splitlines()
        suffix = pathlib.PurePath(path).suffix
        if suffix != ".md" and path != "LICENSE":
            found += text_rules(path, lines)
        if suffix in {".h", ".cuh"}:
            found += guard_rule(path, text)
        if suffix == ".proto":
            found += proto_rules(path, lines)
        if suffix in SOURCES and not path.startswith("tests/"):
            code[path] = lines
        if path.startswith("tests/"):
            tests += text
    found += duplicate_rule(code)
    found += glossary_rule(pathlib.Path("docs/glossary.md").read_text())
    found += invariant_rule(pathlib.Path("docs/architecture.md").read_text(), tests)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
