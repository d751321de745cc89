"""The bundle of scripts/gpu_bundle.sh on a system that has nothing of what it was built with, no network and no CUDA.

scripts/bundle_check.sh makes such a system and runs this in it, with that system's Python:

  bare_bundle_test.py BUNDLE [arguments of unittest]
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import zipfile

BUNDLE = pathlib.Path(sys.argv.pop(1)).resolve()
PROGRAMS = sorted((BUNDLE / "bin").iterdir())
MODULES = sorted((BUNDLE / "lib").glob("libdmuon_*.so"))
CUDA = {"libcudart.so.13", "libcublasLt.so.13", "libnccl.so.2"}
# The C and C++ runtimes are the system's.
RUNTIMES = re.compile(r"(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+|ld-linux-x86-64)\.so\.\d+")


def run(*command, expect=0, timeout=60, **options):
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=timeout, **options)
    if done.returncode != expect:
        raise AssertionError(f"{command}: exit code {done.returncode}, expected {expect}:\n{done.stdout[-4000:]}")
    return done.stdout


class Libraries(unittest.TestCase):
    def resolved(self, file, home):
        """The loader's answers for one file: each is in `home`, a runtime of the system, or CUDA's and not there."""
        said = run("ldd", "-r", file)
        self.assertNotIn("version `", said)
        missing = set()
        for line in said.splitlines():
            name, arrow, where = line.strip().partition(" => ")
            if where.startswith("not found"):
                missing.add(name)
            elif arrow and not RUNTIMES.fullmatch(name):
                self.assertTrue(pathlib.Path(where.split()[0]).resolve().is_relative_to(home), line)
        # Symbols of a library that is not there are undefined, too.
        self.assertTrue(missing or "undefined symbol" not in said, said)
        return missing

    def test_of_programs_are_beside_them(self):
        for program in PROGRAMS:
            with self.subTest(program.name):
                self.assertEqual(self.resolved(program, BUNDLE / "lib"), set())

    def test_of_modules_are_beside_them_but_for_cuda(self):
        self.assertEqual([m.name for m in MODULES], ["libdmuon_cuda.so", "libdmuon_gpu_probe.so", "libdmuon_nccl.so"])
        for module in MODULES:
            with self.subTest(module.name):
                self.assertLessEqual(self.resolved(module, BUNDLE / "lib"), CUDA)


class Programs(unittest.TestCase):
    def test_say_what_they_are(self):
        for name in ("dmuond", "dmuonctl"):
            with self.subTest(name):
                self.assertRegex(run(BUNDLE / "bin" / name, "--version"), r"\d+\.\d+\.\d+")
                self.assertIn("--help", run(BUNDLE / "bin" / name, "--help"))

    def test_a_trainer_trains_beside_the_daemon(self):
        with tempfile.TemporaryDirectory() as sockets:
            ready, daemons_end = os.pipe()
            with open(f"{sockets}/log", "w+") as log:
                command = [BUNDLE / "bin/dmuond", "--socket-dir", sockets, "--ready-fd", str(daemons_end)]
                daemon = subprocess.Popen(command, pass_fds=[daemons_end], stdout=log, stderr=log)
                self.addCleanup(daemon.kill)
                os.close(daemons_end)
                self.assertTrue(os.read(ready, 16), pathlib.Path(log.name).read_text())
                os.close(ready)
                trained = run(BUNDLE / "bin/e2e_trainer", "once", sockets, "bare", "1", "0")
                self.assertEqual(trained.split("\n"), ["step 1", "closed", ""])
                self.assertIn("cpu", run(BUNDLE / "bin/dmuonctl", "--endpoint", sockets, "status"))
                daemon.terminate()
                self.assertEqual(daemon.wait(30), 0)
                log.seek(0)
                # It looked for a GPU, and says what it found instead.
                self.assertRegex(log.read(), r"libcudart\.so\.13|libcublasLt\.so\.13")

    def test_the_end_to_end_suite_passes(self):
        # It copies programs away from the bundle's libraries.
        environment = {**os.environ, "DMUON_TEST_BACKEND": "cpu", "LD_LIBRARY_PATH": str(BUNDLE / "lib")}
        said = run(BUNDLE / "bin/e2e_test", "--gtest_brief=1", timeout=300, env=environment)
        self.assertRegex(said, r"\[  PASSED  \] [1-9]\d+ tests")


# As a stranger would use the module: without dmuon/__init__.py, which wants torch.
ORTHOGONALIZE = """
import array, sys, types
package = types.ModuleType("dmuon")
package.__path__ = [sys.argv[1] + "/dmuon"]
sys.modules["dmuon"] = package
from dmuon import _native
matrix, out = (memoryview(array.array("f", [1, 0, 0, 0, 2, 0])).cast("b").cast("f", (1, 2, 3)) for _ in range(2))
options = _native.NewtonSchulzOptions(form=_native.NsForm.DIRECT, steps=5, coefficients=[], restarts=None,
                                      deterministic=False)
_native.newton_schulz(matrix, out, options, 1)
print([round(value) for row in out.tolist()[0] for value in row])
"""


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.site = pathlib.Path(folder.name)
        for wheel in (BUNDLE / "wheels").glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(cls.site)
        for program in cls.site.glob("dmuon.scripts/*"):
            program.chmod(0o755)

    def test_the_module_computes(self):
        said = run(sys.executable, "-c", ORTHOGONALIZE, self.site, env={**os.environ, "PYTHONPATH": str(self.site)})
        self.assertEqual(said.strip(), "[1, 0, 0, 0, 1, 0]")

    def test_it_says_what_it_needs(self):
        (metadata,) = self.site.glob("dmuon-*.dist-info/METADATA")
        self.assertRegex(metadata.read_text(), r"\nRequires-Dist: nanobind-backend>=1\.0\n")

    def test_its_programs_start(self):
        for name in ("dmuond", "dmuonctl"):
            self.assertRegex(run(self.site / "dmuon.scripts" / name, "--version"), r"\d+\.\d+\.\d+")


class GpuCheck(unittest.TestCase):
    def test_help(self):
        self.assertIn("--seconds", run(BUNDLE / "scripts/gpu_check.sh", "--help"))

    def test_without_a_gpu_it_says_so(self):
        self.assertIn("no NVIDIA driver", run(BUNDLE / "scripts/gpu_check.sh", expect=3))

    def test_it_has_all_that_it_runs(self):
        script = (BUNDLE / "scripts/gpu_check.sh").read_text()
        files = re.findall(r"tests/cuda/gpu/\w+\.py", script)
        files += [f"tests/cuda/gpu/{part}.py" for part in re.findall(r"of_python (\w+)", script)]
        files += [f"bin/{program}" for program in re.findall(r"cuda_\w+|e2e_test", script)]
        self.assertGreaterEqual(len(set(files)), 10, files)
        for file in files:
            self.assertTrue((BUNDLE / file).is_file(), file)


if __name__ == "__main__":
    unittest.main(verbosity=2)
