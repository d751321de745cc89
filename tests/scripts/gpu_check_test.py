"""scripts/gpu_check.sh where there is no GPU: what it refuses, by name and exit code, and what Ctrl-C leaves."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/gpu_check.sh"
sys.path.insert(0, str(ROOT / "tests/cuda/gpu"))

import libraries  # noqa: E402

# A shell that starts the tests in the background ignores SIGINT for all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def check(*arguments, **environment):
    return subprocess.run([SCRIPT, *arguments], env={**os.environ, **environment}, capture_output=True, text=True,
                          timeout=60)


class GpuCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.bundle = self.root / "bundle"
        (self.bundle / "bin").mkdir(parents=True)
        (self.bundle / "COMMIT").write_text("none\n")

    def driver(self, code):
        """The folder of a driver whose cuInit answers `code`."""
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(self.root / "libcuda.so.1")],
            input=f"int cuInit(unsigned flags) {{ (void)flags; return {code}; }}", text=True, check=True,
        )
        return str(self.root)

    def test_help(self):
        told = check("--help")
        self.assertEqual(told.returncode, 0)
        for option in ("--bundle", "--out", "--seconds", "PART", "Exit code"):
            self.assertIn(option, told.stdout)

    def test_a_wrong_command_line_is_named(self):
        for arguments, word in (
            (["--out"], "--out needs a value"), (["--often"], "no option --often"),
            (["everything"], "no part everything"),
            (["--seconds", "soon"], "got 'soon'"),
            (["--seconds", "0"], "got '0'"),
        ):
            told = check(*arguments)
            self.assertEqual(told.returncode, 2, told.stderr)
            self.assertIn(word, told.stderr)

    def test_what_is_missing_is_named(self):
        told = check("--bundle", str(self.root / "none"))
        self.assertEqual(told.returncode, 3)
        self.assertIn(f"no bundle in {self.root / 'none'}", told.stderr)
        told = check("--bundle", str(self.bundle), LD_LIBRARY_PATH=self.driver(100))
        self.assertEqual(told.returncode, 3)
        self.assertIn("cuInit answers 100", told.stderr)

    def test_ctrl_c_leaves_the_results_so_far(self):
        begun = self.root / "begun"
        os.mkfifo(begun)
        program = self.bundle / "bin/cuda_step_kernels_test"
        program.write_text(f"#!/bin/sh\necho begun >{begun}\nexec sleep 60\n")
        program.chmod(0o755)
        out = self.root / "out"
        process = subprocess.Popen(
            [SCRIPT, "--bundle", str(self.bundle), "--out", str(out)],
            env={**os.environ, "LD_LIBRARY_PATH": self.driver(0)}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        if not self.has_begun(process, begun):
            self.skipTest("no libcublasLt.so.13 and libcudart.so.13 here")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        printed, errors = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 130, printed + errors)
        self.assertIn("interrupted", errors)
        json.loads((out / "gpu_check.json").read_text())

    @staticmethod
    def has_begun(process, fifo):
        """False: it ended before."""
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.set_blocking(reader, True)
            while process.poll() is None:
                if os.read(reader, 16):
                    return True
            return False
        finally:
            os.close(reader)


def touch(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


class Libraries(unittest.TestCase):
    """Layouts as pip's wheels of CUDA 13, the toolkit and Debian have them, made up."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def choose(self, path=(), toolkits=(), loader=()):
        folders = libraries.of_packages(map(str, path)) + libraries.of_toolkits(map(str, toolkits))
        return libraries.choose(folders, "".join(f"\t{name} (libc6,x86-64) => /usr/lib/{name}\n" for name in loader))

    def test_those_of_torch_come_before_the_toolkit(self):
        site = self.root / "site-packages"
        cuda = touch(site / "nvidia/cu13/lib", "libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13")
        nccl = touch(site / "nvidia/nccl/lib", "libnccl.so.2")
        touch(site / "nvidia/cudnn/lib", "libcudnn.so.9")
        touch(self.root / "cuda/lib64", "libcudart.so.13", "libcublasLt.so.13", "libnccl.so.2")
        self.assertEqual(self.choose([self.root / "elsewhere", site], [self.root / "cuda"]), ([cuda, nccl], []))

    def test_a_toolkit_alone_will_do(self):
        folder = touch(self.root / "cuda/targets/x86_64-linux/lib", "libcudart.so.13", "libcublasLt.so.13")
        found = self.choose([self.root], [self.root / "cuda"], ["libnccl.so.2"])
        self.assertEqual(found, ([folder], []))

    def test_another_major_version_is_none(self):
        touch(self.root / "cuda/lib64", "libcudart.so.12", "libcublasLt.so.12")
        _, missing = self.choose((), [self.root / "cuda"], ["libcudart.so.12"])
        self.assertEqual(missing, ["libcudart.so.13", "libcublasLt.so.13", "libnccl.so.2"])

    def test_the_path_is_printed_and_what_is_missing_named(self):
        site = self.root / "site"
        cuda = touch(site / "nvidia/cu13/lib", "libcudart.so.13", "libcublasLt.so.13")
        done = subprocess.run([sys.executable, ROOT / "tests/cuda/gpu/libraries.py"], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(site)}, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.strip().split(":")[0], str(cuda))


if __name__ == "__main__":
    unittest.main()
