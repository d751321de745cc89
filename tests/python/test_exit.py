"""The end of a process whose last act was a collective."""

import os
import subprocess
import sys

import pytest

# Gloo's thread tells that the collective is done and then loses its core for a while.
SLOW = """
#include <dlfcn.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
void _ZNSt18condition_variable10notify_allEv(void* self) {
  struct timespec begin, now;
  char name[16];
  ((void (*)(void*))dlsym(RTLD_NEXT, "_ZNSt18condition_variable10notify_allEv"))(self);
  if (prctl(PR_GET_NAME, name) != 0 || strcmp(name, "pt_gloo_runloop") != 0) return;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  do clock_gettime(CLOCK_MONOTONIC, &now);
  while ((now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) / 1000000 < 50);
}
"""

SCRIPT = """
import atexit
atexit.register(sum, range(20_000_000))  # runs after dmuon's, and keeps the GIL until the interpreter ends
import os, sys, dmuon, torch.distributed as dist
from dmuon import context
if sys.argv[2] == "unprotected":
    atexit.unregister(context._close_all)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
group = dist.group.WORLD  # somebody holds it, as FSDP2 does
dist.all_gather_object([None] * 2, rank)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    library = tmp_path_factory.mktemp("slow") / "slow.so"
    subprocess.run(
        ["cc", "-D_GNU_SOURCE", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library),
         "-ldl", "-Wl,--no-as-needed", "-lstdc++"],
        input=SLOW, text=True, check=True,
    )  # fmt: skip
    return library


def run(store, how, library):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(store), how],
            env={**os.environ, "RANK": str(rank), "LD_PRELOAD": str(library)}, text=True, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    return [(rank.communicate(timeout=60)[1], rank.returncode) for rank in ranks]


def test_a_late_thread_of_gloo_does_not_abort_the_process(slow, tmp_path):
    if all(code == 0 for _, code in run(tmp_path / "unprotected", "unprotected", slow)):
        pytest.skip("this PyTorch does not abort without dmuon either")
    ended = run(tmp_path / "protected", "protected", slow)
    assert all(code == 0 for _, code in ended), ended
