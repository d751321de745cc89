"""scripts/setup.sh in a tree of its own, with stand-ins for the programs that it calls: who holds its lock, when."""

import fcntl
import hashlib
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
REQUIREMENTS = "python_client/requirements-dev.txt"

PATIENCE = 30  # seconds, for what takes one

# Writes "NAME: free" or "NAME: held", and how many of its descriptors are the lock.
REPORT = """#!/bin/sh
if flock -n "$LOCK" true; then state=free; else state=held; fi
echo "${0##*/}: $state, $(ls -l /proc/self/fd | grep -c setup.lock) inherited" >>"$REPORT"
"""


class SetupLock(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name in ("scripts/setup.sh", "scripts/env.sh", REQUIREMENTS):
            (self.root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        cache = self.root / "cache/dmuon"
        cache.mkdir(parents=True)
        self.lock = cache / "setup.lock"
        self.report = self.root / "report"
        programs = self.root / "programs"
        programs.mkdir()
        # All packages are there; the environment is not, and is made by a python3 that puts a pip there.
        self.program(programs / "dpkg-query", '#!/bin/sh\nfor name; do echo "installed $name"; done\n')
        venv = cache / f"venv-{hashlib.sha256((ROOT / REQUIREMENTS).read_bytes()).hexdigest()[:12]}"
        self.program(programs / "python3", REPORT + f'mkdir -p {venv}/bin && ln -s /bin/true {venv}/bin/python\n')
        self.program(programs / "cmake", REPORT)
        self.environment = dict(os.environ, XDG_CACHE_HOME=str(self.root / "cache"), LOCK=str(self.lock),
                                REPORT=str(self.report), PATH=f"{programs}:{os.environ['PATH']}")

    @staticmethod
    def program(path: pathlib.Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *arguments: str) -> subprocess.Popen:
        process = subprocess.Popen([self.root / "scripts/setup.sh", *arguments], env=self.environment, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def test_the_environment_is_made_under_the_lock_and_the_build_is_not(self):
        setup = self.start()
        output, _ = setup.communicate(timeout=PATIENCE)
        self.assertEqual(setup.returncode, 0, output)
        self.assertNotIn("waiting", output)
        self.assertEqual(self.report.read_text().splitlines(),
                         ["python3: held, 0 inherited", "cmake: free, 0 inherited", "cmake: free, 0 inherited"])

    def test_whoever_waits_for_another_setup_says_so(self):
        with self.lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            setup = self.start("--no-build")
            heard, _, _ = select.select([setup.stdout], [], [], PATIENCE)
            self.assertTrue(heard, "it waits and says nothing")
            self.assertIn("waiting for another setup", setup.stdout.readline())
            self.assertFalse(self.report.exists())
        output, _ = setup.communicate(timeout=PATIENCE)
        self.assertEqual(setup.returncode, 0, output)
        self.assertTrue(self.report.exists())


if __name__ == "__main__":
    unittest.main()
