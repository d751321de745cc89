"""scripts/gpu_check.sh where there is no GPU: what it refuses, by name and exit code, and what Ctrl-C leaves."""

import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/gpu_check.sh"
sys.path.insert(0, str(ROOT / "tests/cuda/gpu"))

import goals  # noqa: E402
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

    def program(self, name, text):
        program = self.bundle / "bin" / name
        program.write_text("#!/bin/sh\n" + text)
        program.chmod(0o755)

    def machine(self):
        """The environment of a machine with a driver and CUDA's libraries."""
        touch(self.root / "site/nvidia/cu13/lib", "libcudart.so.13", "libcublasLt.so.13")
        return {**os.environ, "LD_LIBRARY_PATH": self.driver(0), "PYTHONPATH": str(self.root / "site")}

    def test_what_fails_or_hangs_takes_nothing_else_with_it(self):
        self.program("cuda_step_kernels_test", "echo '[ RUN      ] Mean.IsRight'; kill -SEGV $$\n")
        self.program("cuda_newton_schulz_test",
                     "printf '[ RUN      ] A.B\\n[       OK ] A.B (1 ms)\\n[ RUN      ] A.C\\n'; exec sleep 60\n")
        self.program("e2e_test", "echo '{\"tests\": 3, \"failures\": 0}' >\"${1#--gtest_output=json:}\"\n")
        out = self.root / "out"
        begin = time.monotonic()
        told = check("--bundle", str(self.bundle), "--out", str(out), "--seconds", "18", "end_to_end", "tests",
                     "sanitizer", "accuracy", **self.machine())
        self.assertLess(time.monotonic() - begin, 30)
        self.assertEqual(told.returncode, 1, told.stdout + told.stderr)
        report = json.loads((out / "gpu_check.json").read_text())
        steps = {step["step"]: (step["state"], step["why"]) for step in report["steps"]}
        self.assertEqual(steps["end_to_end"], ("ok", ""))
        self.assertEqual(steps["cuda_step_kernels_test"], ("failed", "signal SEGV"))
        self.assertEqual(steps["cuda_newton_schulz_test"], ("stopped", "its time ran out"))
        self.assertEqual(steps["accuracy"], ("not run", "no time left"))
        runs = report["tests"]
        self.assertGreaterEqual(runs["e2e_test"]["tests"], 3)
        self.assertEqual(runs["cuda_step_kernels_test"]["did_not_end"], ["Mean.IsRight"])
        self.assertEqual(runs["cuda_newton_schulz_test"]["did_not_end"], ["A.C"])
        self.assertIn("cuda_newton_schulz_test: stopped, its time ran out", told.stdout)

    def test_a_folder_that_is_not_its_own_keeps_what_is_in_it(self):
        (self.root / "mine.json").write_text("{}")
        told = check("--bundle", str(self.bundle), "--out", str(self.root), "tests", **self.machine())
        self.assertEqual(told.returncode, 2, told.stdout + told.stderr)
        self.assertIn("--out: expected an empty folder or that of an earlier check", told.stderr)
        self.assertTrue((self.root / "mine.json").exists())

    def test_failures_outside_of_tests_are_counted(self):
        # As Google Test writes them: its JSON has those of a suite nowhere, and those of the run make it no JSON.
        self.suite("cuda_step_kernels_test", (
            "[----------] Global test environment set-up.", "[----------] 1 test from Mean", "mean.cc:2: Failure",
            "[ RUN      ] Mean.IsRight", "[  SKIPPED ] Mean.IsRight (0 ms)", "[  FAILED  ] 0 tests, listed below:",
            "[  FAILED  ] Mean: SetUpTestSuite or TearDownTestSuite",
        ), '{"tests": 1, "failures": 0, "testsuites": [{"name": "Mean", "testsuite": [{"name": "IsRight"}]}]}')
        self.suite("cuda_newton_schulz_test", (
            "[----------] Global test environment set-up.", "main.cc:7: Failure", "no device",
            "[ RUN      ] A.B", "[  SKIPPED ] A.B (0 ms)",
        ), '{"tests": 1, "testsuites": [{"name": "A"}  {"name": "NonTestSuiteFailure"}]}')
        out = self.root / "out"
        told = check("--bundle", str(self.bundle), "--out", str(out), "tests", **self.machine())
        self.assertEqual(told.returncode, 1, told.stdout + told.stderr)
        self.assertIn("cuda_step_kernels_test: 1 tests, 1 failed\n", told.stdout)
        self.assertIn("cuda_newton_schulz_test: 1 tests, 1 failed\n", told.stdout)
        runs = json.loads((out / "gpu_check.json").read_text())["tests"]
        self.assertEqual([f["test"] for f in runs["cuda_step_kernels_test"]["failures"]],
                         ["Mean: SetUpTestSuite or TearDownTestSuite"])
        self.assertEqual(runs["cuda_newton_schulz_test"]["failures"],
                         [{"test": "set-up of the run", "failures": ["main.cc:7: Failure\nno device"]}])
        self.assertEqual(runs["cuda_newton_schulz_test"]["did_not_end"], [])

    def suite(self, name, log, result):
        """A program that fails after it has written these."""
        lines = "\n".join(log)
        self.program(name, f"""cat <<'END'
{lines}
END
echo '{result}' >"${{1#--gtest_output=json:}}"
exit 1
""")

    def test_what_did_not_run_shows_in_the_exit_code(self):
        self.program("e2e_test", "echo '{\"tests\": 3, \"failures\": 0}' >\"${1#--gtest_output=json:}\"\n")
        told = check("--bundle", str(self.bundle), "--out", str(self.root / "out"), "end_to_end", **self.machine())
        self.assertEqual(told.returncode, 0, told.stdout + told.stderr)
        told = check("--bundle", str(self.bundle), "--out", str(self.root / "out"), "--seconds", "9", "end_to_end",
                     **self.machine())
        self.assertEqual(told.returncode, 4, told.stdout + told.stderr)
        self.assertIn("end_to_end: not run, no time left", told.stdout)

    def test_ctrl_c_leaves_the_results_so_far(self):
        begun = self.root / "begun"
        os.mkfifo(begun)
        self.program("cuda_step_kernels_test", f"echo begun >{begun}\nexec sleep 60\n")
        out = self.root / "out"
        process = subprocess.Popen(
            [SCRIPT, "--bundle", str(self.bundle), "--out", str(out)], env=self.machine(), start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        self.addCleanup(process.kill)
        reader = os.open(begun, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        self.assertTrue(select.select([reader], [], [], 30)[0])
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        printed, errors = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 130, printed + errors)
        self.assertIn("interrupted", errors)
        report = json.loads((out / "gpu_check.json").read_text())
        self.assertEqual([step["state"] for step in report["steps"]], ["interrupted"])


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


class Goals(unittest.TestCase):
    def test_what_was_not_measured_is_neither_met_nor_missed(self):
        listed = goals.goals({})
        self.assertGreater(len(listed), 10)
        self.assertEqual([goal["met"] for goal in listed], [None] * len(listed))

    def test_each_figure_is_held_against_its_own_goal(self):
        large = f"x {goals.LARGE}"
        shares = {f"{name} {large}": {"of_copy": 0.9} for name in goals.FUSED}
        listed = goals.goals({
            "timing": {"1024x4096": {"over_torch_compiled": 0.4, "share_of_peak": 0.1},
                       "2048x8192": {"over_torch_compiled": 0.6, "share_of_peak": 0.7},
                       "4096x4096": {"error": "RuntimeError: out of memory"}},
            "peer": {"2048x8192": {"over_peer": 1.3}},
            "host": {"host_ms_per_step": 0.5},
            "kernels": {**shares, f"adamw {large}": {"of_copy": 0.8}, "adamw x 64": {"of_copy": 0.1}},
        })
        measured = [(goal["measured"], goal["met"]) for goal in listed if goal["met"] is not None]
        self.assertEqual(measured, [(0.4, True), (0.6, False), (1.3, False), (0.7, True), (0.8, False), (0.5, True)])


if __name__ == "__main__":
    unittest.main()
