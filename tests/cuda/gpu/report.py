"""Gathers what the parts of scripts/gpu_check.sh left into gpu_check.json and prints the tables.

Exit code: 0 when every step ended well, 1 when one failed or did not end, 4 when one was not run or not whole.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from goals import goals
from tables import (
    print_accuracy,
    print_goals,
    print_host,
    print_kernels,
    print_peer,
    print_timing,
    print_trainer,
)

SHOW = {
    "host": print_host,
    "kernels": print_kernels,
    "timing": print_timing,
    "peer": print_peer,
    "trainer": print_trainer,
    "accuracy": print_accuracy,
}


def take(path: Path) -> dict[str, Any]:
    """A part's file, which is gone afterwards."""
    try:
        return json.loads(path.read_text())
    except OSError:
        return {}
    except ValueError as error:
        return {"error": f"{path.name}: {error}"}
    finally:
        path.unlink(missing_ok=True)


def take_steps(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    rows = (line.split("\t") for line in lines)
    return [{"step": name, "state": state, "seconds": int(seconds), "why": why} for name, state, seconds, why in rows]


def of_json(run: dict[str, Any]) -> dict[str, Any]:
    failures = [
        {"test": f"{suite['name']}.{case['name']}", "failures": [f["failure"][:400] for f in case["failures"][:5]]}
        for suite in run.get("testsuites", [])
        for case in suite["testsuite"]
        if "failures" in case
    ]
    return {"tests": run["tests"], "failed": run.get("failures", 0), "failures": failures}


def of_log(text: str) -> dict[str, Any]:
    """A run that did not come to its end wrote no JSON: what its log tells, and in which test it was."""
    begun = re.findall(r"^\[ RUN      \] (\S+)", text, re.M)
    results = re.findall(r"^\[ +(OK|FAILED|SKIPPED) +\] (\S+?)(?:, where .*)? \(\d+ ms\)", text, re.M)
    ended = {name: state for state, name in results}
    return {
        "tests": len(begun),
        "failed": sum(state == "FAILED" for state in ended.values()),
        "failures": [{"test": name, "failures": []} for name, state in ended.items() if state == "FAILED"],
        "was_in": next((name for name in reversed(begun) if name not in ended), None),
    }


def outside_tests(text: str) -> list[dict[str, Any]]:
    """Failures where a suite or the run is set up or taken down: Google Test's JSON has them in no test, or is none."""
    suites = re.findall(r"^\[  FAILED  \] (\S+): SetUpTestSuite or TearDownTestSuite", text, re.M)
    runs = re.findall(r"^\[-+\] Global test environment (\S+)\.\n([^\[].*: Failure\n.*)", text, re.M)
    return [{"test": f"{suite}: SetUpTestSuite or TearDownTestSuite", "failures": []} for suite in suites] + [
        {"test": f"{which} of the run", "failures": [failure[:400]]} for which, failure in runs
    ]


def of_run(log: Path, result: Path) -> dict[str, Any]:
    text = log.read_text(errors="replace")
    written = take(result)
    run = of_json(written) if "tests" in written else of_log(text)
    outside = outside_tests(text)
    run["failures"] += outside
    run["failed"] += len(outside)
    return run


def tests(folder: Path) -> dict[str, Any]:
    """By program; shards of one together."""
    runs: dict[str, Any] = {}
    for log in sorted((folder / "logs").glob("*_test*.log")):
        if log.name.startswith(("memcheck.", "racecheck.")):
            continue
        run = of_run(log, folder / f"{log.stem}.json")
        empty: dict[str, Any] = {"tests": 0, "failed": 0, "failures": [], "did_not_end": []}
        total = runs.setdefault(log.name.partition(".")[0], empty)
        for key in ("tests", "failed", "failures"):
            total[key] += run[key]
        total["did_not_end"] += [run["was_in"]] if run.get("was_in") else []
    return runs


def print_tests(runs: dict[str, Any]) -> None:
    for name, run in runs.items():
        names = ", ".join(run["did_not_end"])
        print(f"{name}: {run['tests']} tests, {run['failed']} failed{names and ', did not end: '}{names}")


def main() -> int:
    folder = Path(sys.argv[1])
    report: dict[str, Any] = {"steps": take_steps(folder / "steps.tsv"), "tests": tests(folder)}
    for part in SHOW:
        report[part] = take(folder / f"{part}.json")
    report["goals"] = goals(report)
    (folder / "gpu_check.json").write_text(json.dumps(report, indent=1))
    print_tests(report["tests"])
    for part, show in SHOW.items():
        show(report[part])
    print_goals(report["goals"])
    print()
    for step in report["steps"]:
        print(f"{step['step']}: {step['state']}{step['why'] and ', '}{step['why']} ({step['seconds']} s)")
    states = {step["state"] for step in report["steps"]}
    if states & {"failed", "stopped"}:
        return 1
    return 4 if states & {"not run", "incomplete"} else 0


if __name__ == "__main__":
    sys.exit(main())
