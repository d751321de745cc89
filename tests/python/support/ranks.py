"""Processes that are the ranks of a Gloo group, kept for many tests; each runs functions that it is sent."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback


class RankError(AssertionError):
    """What a function raised on a rank. `kind`: name of the exception's type; `text`: its message."""

    def __init__(self, rank, kind, text, trace):
        super().__init__(f"rank {rank}: {kind}: {text}\n{trace}")
        self.rank, self.kind, self.text = rank, kind, text


class Ranks:
    def __init__(self, world_size, endpoint):
        context = multiprocessing.get_context("spawn")
        self._file = tempfile.mktemp(prefix="dmuon-test-store-")
        self._workers = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world_size, self._file, endpoint), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def alive(self):
        return bool(self._workers) and all(process.is_alive() for process, _ in self._workers)

    def run(self, function, *args, timeout, **kwargs):
        for _, pipe in self._workers:
            pipe.send((function, args, kwargs))
        deadline = time.monotonic() + timeout
        answers = []
        for rank, (process, pipe) in enumerate(self._workers):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise RankError(rank, "Timeout", f"no answer within {timeout} s", "")
                answers.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                process.join(5)
                answers.append(("error", "Died", f"exit code {process.exitcode}", ""))
            except RankError:
                self.close()
                raise
        for rank, answer in enumerate(answers):
            if answer[0] == "error":
                self.close()  # the others may wait in a collective, and what is left of a failed test is not known
                raise RankError(rank, *answer[1:])
        return [answer[1] for answer in answers]

    def close(self):
        for process, pipe in self._workers:
            pipe.close()
            process.join(2)
            process.kill()
            process.join()
        self._workers = []
        if os.path.exists(self._file):
            os.unlink(self._file)


def _serve(pipe, rank, world_size, file, endpoint):
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from support import fake_gpu
    from support.models import DEVICE

    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    os.environ["DMUON_ENDPOINT"] = endpoint
    # Of a job on GPUs no tensor on the CPU is communicated, as with NCCL.
    dist.init_process_group(
        "gloo" if DEVICE == "cpu" else "cuda:gloo", init_method=f"file://{file}", rank=rank, world_size=world_size,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    if DEVICE == "cuda":
        fake_gpu.carry_collectives()
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            answer = ("ok", function(rank, world_size, *args, **kwargs))
            pickle.dumps(answer)
        except BaseException as error:
            answer = ("error", type(error).__name__, str(error), traceback.format_exc())
        try:
            pipe.send(answer)
        except BrokenPipeError:
            break
    os._exit(0)
