"""The project that the README shows a C++ author: it configures, and its own files are compiled as it likes.

usage: linking_test.py CMAKE
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CMAKE = sys.argv.pop(1)


class ProjectOfTheReadme(unittest.TestCase):
    def test_configures_and_knows_the_headers_but_not_our_options(self):
        (project,) = re.findall(r"```cmake\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder)
            (source / "CMakeLists.txt").write_text(project)
            (source / "trainer.cc").write_text('#include "client/dmuon/client.h"\nint main() {}\n')
            (source / "dmuon").symlink_to(ROOT)
            configured = subprocess.run([CMAKE, "-G", "Ninja", "-S", source, "-B", source / "build"], timeout=100,
                                        capture_output=True, text=True)
            self.assertEqual(configured.returncode, 0, configured.stderr)
            commands = subprocess.run(["ninja", "-C", source / "build", "-t", "commands", "trainer"], timeout=30,
                                      capture_output=True, text=True, check=True).stdout.splitlines()
            ours = [line for line in commands if line.endswith("/client/session.cc")]
            (theirs,) = [line for line in commands if line.endswith("/trainer.cc")]
            self.assertTrue(all("-fno-rtti" in line for line in ours) and ours)
            self.assertNotIn("-fno-rtti", theirs)
            syntax = re.sub(r"-MD .*? -c ", "-fsyntax-only ", theirs)
            self.assertEqual(subprocess.run(syntax, shell=True, cwd=source / "build", timeout=60).returncode, 0)


if __name__ == "__main__":
    unittest.main()
