"""The unit file and the manifest, checked by the tools that will read them. Exit 77: the modules for it are not there.

usage: deploy_test.py DMUOND
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
from typing import ClassVar

try:
    import kubernetes_validate
    import yaml
except ImportError as error:
    print(f"skipped: {error}; scripts/setup.sh makes an environment that has it")
    sys.exit(77)

DEPLOY = pathlib.Path(__file__).resolve().parents[2] / "deploy"
DMUOND = sys.argv.pop(1)


def default_config() -> dict:
    return yaml.safe_load((DEPLOY / "dmuond.yaml").read_text())


def check_config(folder: str, text: str) -> subprocess.CompletedProcess:
    file = pathlib.Path(folder) / "dmuond.yaml"
    file.write_text(text)
    return subprocess.run([DMUOND, "--config", file, "--check-config"], capture_output=True, text=True, timeout=30)


class SystemdUnit(unittest.TestCase):
    unit = (DEPLOY / "systemd/dmuond.service").read_text()

    def verify(self, unit: str) -> str:
        """What systemd-analyze has to say; it exits 0 for an unknown key, so its words are what counts."""
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "dmuond.service"
            file.write_text(unit.replace("/usr/bin/dmuond", DMUOND))
            done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def test_systemd_finds_nothing_to_say(self) -> None:
        self.assertEqual(self.verify(self.unit), "")

    def test_a_misspelt_key_is_found(self) -> None:
        self.assertIn("Restrat", self.verify(self.unit.replace("Restart=", "Restrat=")))

    def test_exposure_is_at_most_2_5(self) -> None:
        file = DEPLOY / "systemd/dmuond.service"
        done = subprocess.run(["systemd-analyze", "security", "--offline=yes", "--threshold=25", "--no-pager", file],
                              capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stdout[-2000:])

    def test_a_drain_has_time_to_end(self) -> None:
        timeout = int(re.search(r"^TimeoutStopSec=(\d+)$", self.unit, re.MULTILINE).group(1))
        self.assertGreater(timeout, default_config()["drain_timeout_seconds"])

    def test_the_runtime_directory_is_where_the_daemon_listens(self) -> None:
        self.assertIn("\nRuntimeDirectory=dmuon\n", self.unit)
        self.assertIn("\nRuntimeDirectoryMode=0750\n", self.unit)
        self.assertEqual(default_config()["socket_dir"], "/run/dmuon")


class DaemonSet(unittest.TestCase):
    documents: ClassVar[list] = list(yaml.safe_load_all((DEPLOY / "kubernetes/daemonset.yaml").read_text()))

    def pod(self) -> dict:
        return next(d for d in self.documents if d["kind"] == "DaemonSet")["spec"]["template"]["spec"]

    def config(self) -> str:
        return next(d for d in self.documents if d["kind"] == "ConfigMap")["data"]["dmuond.yaml"]

    def test_it_fits_the_schema_of_each_version(self) -> None:
        for version in ["1.29", "1.33", kubernetes_validate.latest_version()]:
            for document in self.documents:
                kubernetes_validate.validate(document, version, strict=True)

    def test_a_misspelt_key_is_found(self) -> None:
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**self.documents[1], "sepc": {}}, "1.33", strict=True)

    def test_readiness_asks_the_tool(self) -> None:
        self.assertEqual(self.pod()["containers"][0]["readinessProbe"]["exec"]["command"], ["dmuonctl", "status"])

    def test_no_more_of_the_host_than_the_pid_namespace(self) -> None:
        pod = self.pod()
        self.assertNotIn("hostIPC", pod)
        self.assertNotIn("hostNetwork", pod)
        for container in pod["initContainers"] + pod["containers"]:
            self.assertFalse(container["securityContext"]["allowPrivilegeEscalation"])
            self.assertEqual(container["securityContext"]["capabilities"]["drop"], ["ALL"])

    def test_a_drain_has_time_to_end(self) -> None:
        drain = yaml.safe_load(self.config())["drain_timeout_seconds"]
        self.assertGreater(self.pod()["terminationGracePeriodSeconds"], drain)

    def test_the_daemon_takes_its_configuration(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            done = check_config(folder, self.config())
        self.assertEqual(done.returncode, 0, done.stderr)


class DocumentedConfiguration(unittest.TestCase):
    def test_the_daemon_takes_deploy_dmuond_yaml(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            done = check_config(folder, (DEPLOY / "dmuond.yaml").read_text())
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_every_key_of_the_schema_is_documented(self) -> None:
        schema = (DEPLOY.parent / "proto/dmuon/config/v1/config.proto").read_text()
        keys = re.findall(r"^\s+(?:repeated )?\w+ (\w+) = \d+;", schema, re.MULTILINE)
        self.assertGreater(len(keys), 10)
        self.assertEqual(sorted(default_config()), sorted(keys))


if __name__ == "__main__":
    unittest.main()
