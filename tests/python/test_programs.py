"""Where the package finds the programs that were installed with it."""

import os
import shutil
import subprocess
import sys

import dmuon._programs
import pytest

FIND = "import sys; sys.path.insert(0, sys.argv[1]); import _programs; print(_programs.find('dmuond'))"


@pytest.fixture
def find(tmp_path):
    """What find() says in an installation of its own under tmp_path, which a program was put into."""
    package = tmp_path / "site" / "dmuon"
    package.mkdir(parents=True)
    shutil.copy(dmuon._programs.__file__, package)

    def run(path="", **environment):
        # -I would hide the user scheme.
        environment = {**os.environ, "PATH": str(path), "PYTHONUSERBASE": str(tmp_path / "user"), **environment}
        done = subprocess.run([sys.executable, "-c", FIND, package], env=environment, capture_output=True, text=True,
                              check=True, timeout=60)  # fmt: skip
        return done.stdout.strip()

    return run


def put(folder):
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "dmuond"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return str(program)


def test_the_wheels_own_before_what_starts_it(find, tmp_path):
    put(tmp_path / "site" / "bin")
    own = put(tmp_path / "site" / "dmuon.scripts")
    assert find() == own


def test_of_pip_install_target_before_those_on_path(find, tmp_path):
    own = put(tmp_path / "site" / "bin")
    put(tmp_path / "path")
    assert find(tmp_path / "path") == own


def test_of_pip_install_user(find, tmp_path):
    own = put(tmp_path / "user" / "bin")
    assert find() == own


def test_on_path_when_nothing_else_is_there(find, tmp_path):
    assert find(tmp_path) == "None"
    own = put(tmp_path)
    assert find(tmp_path) == own


def test_what_cannot_be_run_is_no_program(find, tmp_path):
    os.chmod(put(tmp_path / "site" / "bin"), 0o644)
    assert find() == "None"
