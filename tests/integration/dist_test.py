#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Two to four processes of dist_driver: collectives, disagreements, deaths. Nothing may be left behind."""
import array
import importlib.util
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

DRIVER = os.path.join(os.environ["PS_BUILD"], "tests", "dist_driver")
MODULE = os.path.join(os.environ["PS_BUILD"], "lib", "paramsync", "libparamsync-gloo.so")
SLOW = 4 if os.environ.get("PS_SANITIZER") else 1
# What the watchdog promises is 2 s (and the deadline + 1 s); a busy machine gets more.
DEATH_S = 5 * SLOW
CLEAN = {k: v for k, v in os.environ.items()
         if not k.startswith(("OMPI_", "SLURM_", "VC_", "MA_", "TORCHELASTIC_")) and
         k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PARAMSYNC_JOB_SECRET")}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Rank:
    all = []

    def __init__(self, argv, env=None):
        Rank.all.append(self)
        self.err = tempfile.TemporaryFile()
        self.out = tempfile.TemporaryFile()
        self.process = subprocess.Popen(argv, stdout=self.out, stderr=self.err, env={**CLEAN, **(env or {})})

    def text(self, which):
        return os.pread(which.fileno(), 1 << 20, 0).decode()

    def wait_for(self, word, timeout=30 * SLOW):
        end = time.monotonic() + timeout
        while word not in self.text(self.out):
            if time.monotonic() > end or self.process.poll() is not None:
                raise AssertionError(f"no {word!r}: {self.text(self.out)} {self.text(self.err)}")
            time.sleep(0.01)

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def reason(self):
        lines = [line for line in self.text(self.err).splitlines() if line.startswith("FAILED: ")]
        return lines[0] if lines else ""


class Job:
    """All ranks of a job. Rank 0 listens on a port of its own choice and the others are told it."""

    def __init__(self, mode, world, flags=(), per_rank=None, host="127.0.0.1"):
        self.ranks = []
        port = 1
        for rank in range(world):
            argv = [DRIVER, mode, "--init_method", f"tcp://{host}:{port}", "--rank", str(rank), "--world_size", str(world),
                    "--any_port", "1", *flags, *((per_rank or {}).get(rank, ()))]
            self.ranks.append(Rank(argv))
            if rank == 0:
                self.ranks[0].wait_for("listening")
                port = int(self.ranks[0].text(self.ranks[0].out).split()[1])

    def wait_running(self):
        for rank in self.ranks:
            rank.wait_for("running")

    def finish(self, timeout, but=()):
        """Exit statuses of all ranks but some, which must end within the timeout."""
        end = time.monotonic() + timeout
        status = {}
        for number, rank in enumerate(self.ranks):
            if number in but:
                continue
            try:
                status[number] = rank.process.wait(max(0.01, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {number} has not ended after {timeout} s: {rank.text(rank.err)}") from None
        return status

    def kill(self):
        for rank in self.ranks:
            rank.end()


class DistTest(unittest.TestCase):
    def tearDown(self):
        for rank in Rank.all:
            rank.end()
            rank.out.close()
            rank.err.close()
        Rank.all.clear()

    def start(self, *args, **kwargs):
        return Job(*args, **kwargs)

    def expect_ok(self, job):
        status = job.finish(60 * SLOW)
        for number, code in status.items():
            self.assertEqual(code, 0, f"rank {number}: {job.ranks[number].text(job.ranks[number].err)}")

    def test_collectives(self):
        for world in (1, 2, 3, 4):
            with self.subTest(world=world):
                self.expect_ok(self.start("collectives", world))

    def test_names_and_addresses(self):
        hosts = ["localhost", "127.0.0.1"]
        with socket.socket(socket.AF_INET6) as s:
            try:
                s.bind(("::1", 0))
                hosts.append("[::1]")
            except OSError:
                pass
        # The host's own name is 127.0.1.1 on Debian: no address by which another machine could be reached, but one
        # that must work between processes of this one.
        try:
            socket.getaddrinfo(socket.gethostname(), 1)
            hosts.append(socket.gethostname())
        except OSError:
            pass
        for host in hosts:
            with self.subTest(host=host):
                self.expect_ok(self.start("collectives", 2, host=host))

    def test_interface(self):
        self.expect_ok(self.start("late", 2, ["--interface", "lo"]))
        job = self.start("late", 2, ["--interface", "nowhere0"])
        self.assertEqual(job.finish(20 * SLOW), {0: 1, 1: 1})
        for rank in job.ranks:
            self.assertIn("nowhere0", rank.reason())

    def test_busy_main_thread_is_no_silence(self):
        self.expect_ok(self.start("late", 3, ["--heartbeat", "1.2"]))

    def test_torchrun_environment(self):
        """With the agent's store on MASTER_PORT, as under torchrun: ours is another port."""
        for attempt in range(5):  # the port after a free one need not be free
            with socket.socket() as agent:
                agent.bind(("127.0.0.1", 0))
                agent.listen()
                env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(agent.getsockname()[1]),
                       "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "r", "LOCAL_WORLD_SIZE": "2"}
                ranks = [Rank([DRIVER, "collectives"], {**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in (0, 1)]
                codes = [rank.process.wait(60 * SLOW) for rank in ranks]
                if codes == [0, 0]:
                    for number, rank in enumerate(ranks):
                        self.assertIn(f"rank {number} of 2 (torchrun)", rank.text(rank.err))
                    return
                self.assertIn("is in use", ranks[0].text(ranks[0].err))
        self.fail("no free port in five attempts")

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch here")
    def test_torchrun_itself(self):
        # Standard output goes through a file: without -r and -t, PyTorch 1.13 fails on Python 3.11.
        with tempfile.TemporaryDirectory() as logs:
            run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "-r", "1", "-t", "1", "--log_dir", logs,
                                  "--no_python", "--standalone", "--nproc_per_node=2", DRIVER, "collectives"],
                                 env=CLEAN, capture_output=True, text=True, timeout=120 * SLOW, check=False)
        self.assertEqual(run.returncode, 0, run.stderr)
        for rank in (0, 1):
            self.assertIn(f"rank {rank} of 2 (torchrun)", run.stderr)

    def test_half_an_environment(self):
        rank = Rank([DRIVER, "collectives"], {"RANK": "0"})
        self.assertEqual(rank.process.wait(20 * SLOW), 1)
        self.assertIn("RANK is set but WORLD_SIZE is not", rank.reason())

    def test_busy_port(self):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            start = time.monotonic()
            rank = Rank([DRIVER, "late", "--init_method", f"tcp://127.0.0.1:{port}", "--rank", "0", "--world_size", "2"])
            self.assertEqual(rank.process.wait(20 * SLOW), 1)
            self.assertLess(time.monotonic() - start, DEATH_S)  # 1 s, and starting the program
            self.assertIn(f"port {port} is in use", rank.reason())

    def test_port_is_free_at_once_after_the_end(self):
        port = free_port()
        for _ in range(3):
            argv = [DRIVER, "collectives", "--init_method", f"tcp://127.0.0.1:{port}", "--world_size", "2", "--rank"]
            ranks = [Rank(argv + [str(r)]) for r in (0, 1)]
            self.assertEqual([r.process.wait(60 * SLOW) for r in ranks], [0, 0], ranks[0].text(ranks[0].err))

    def test_two_jobs_on_one_host(self):
        first, second = self.start("collectives", 2), self.start("collectives", 2)
        self.expect_ok(first)
        self.expect_ok(second)

    def test_different_models(self):
        job = self.start("start", 3, per_rank={2: ("--width", "9")})
        self.assertEqual(job.finish(30 * SLOW), {0: 1, 1: 1, 2: 1})
        for rank in job.ranks:
            self.assertIn("different models: rank 2 differs from rank 0", rank.reason())
            self.assertIn("conv1.0.weight [9, 3, 3, 3] against conv1.0.weight [8, 3, 3, 3]", rank.reason())

    def test_different_settings(self):
        job = self.start("start", 2, per_rank={1: ("--bytes", "64")})
        self.assertEqual(job.finish(30 * SLOW), {0: 1, 1: 1})
        for rank in job.ranks:
            self.assertIn("batch is 64 on rank 1, 128 on rank 0", rank.reason())

    def test_different_world_sizes(self):
        port = free_port()
        ranks = [Rank([DRIVER, "late", "--init_method", f"tcp://127.0.0.1:{port}", "--rank", str(r), "--world_size", str(3 + r)])
                 for r in (0, 1)]
        for rank in ranks:
            self.assertEqual(rank.process.wait(30 * SLOW), 1)
            self.assertIn("was started with 4, rank 0 with 3", rank.reason())

    def test_many_ranks_train_as_one(self):
        """Rule A3, with frozen batch normalisation: W ranks with parts of a batch equal one rank with the whole."""
        with tempfile.TemporaryDirectory() as folder:
            def parameters(world, *flags):
                path = os.path.join(folder, "params")
                self.expect_ok(self.start("train", world, ["--width", "4", "--dump", path, *flags]))
                values = array.array("f")
                with open(path, "rb") as f:
                    values.frombytes(f.read())
                return values

            one = parameters(1)
            norm = math.sqrt(sum(x * x for x in one))
            self.assertGreater(len(one), 40000)
            for world, flags in ((2, ()), (3, ()), (2, ("--uneven", "1")), (3, ("--uneven", "1")), (2, ("--micro", "3")),
                                 (1, ("--micro", "4"))):
                many = parameters(world, *flags)
                off = math.sqrt(sum((x - y) ** 2 for x, y in zip(one, many, strict=True))) / norm
                with self.subTest(world=world, flags=flags):
                    self.assertLess(off, 1e-6)

    def check_death(self, mode, world, victim, how):
        flags = ["--heartbeat", "1.5"] if how == signal.SIGSTOP else []
        job = self.start(mode, world, flags)
        job.wait_running()
        pid = job.ranks[victim].process.pid
        start = time.monotonic()
        os.kill(pid, how)
        status = job.finish(DEATH_S + (2 if how == signal.SIGSTOP else 0), but=(victim,))
        took = time.monotonic() - start
        for number, code in status.items():
            self.assertEqual(code, 1, f"rank {number}")
            reason = job.ranks[number].reason()
            self.assertIn(f"rank {victim}", reason)
            self.assertIn("is silent" if how == signal.SIGSTOP else "died", reason)
            if victim != 0:
                self.assertIn(f"pid {pid}", reason)
        job.kill()
        return took

    def test_killed_rank(self):
        for mode in ("reduce", "reduce_quiet", "compute"):
            for world, victim in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0), (4, 2)):
                with self.subTest(mode=mode, world=world, victim=victim):
                    self.check_death(mode, world, victim, signal.SIGKILL)

    def test_stopped_rank(self):
        for mode, world, victim in (("reduce", 3, 1), ("reduce_quiet", 2, 1), ("compute", 3, 0), ("reduce_quiet", 3, 2), ("reduce", 4, 2)):
            with self.subTest(mode=mode, world=world, victim=victim):
                took = self.check_death(mode, world, victim, signal.SIGSTOP)
                self.assertGreater(took, 0.5)

    def test_rank_that_gives_up(self):
        job = self.start("gives_up", 3)
        self.assertEqual(job.finish(30 * SLOW), {0: 1, 1: 1, 2: 1})
        self.assertIn("FAILED: the loss is not a number", job.ranks[1].reason())
        for number in (0, 2):
            self.assertIn("rank 1 failed: the loss is not a number", job.ranks[number].reason())

    def test_collective_deadline(self):
        job = self.start("stuck", 3, ["--collective", "1"])
        status = job.finish(20 * SLOW, but=(1,))
        self.assertEqual(status, {0: 1, 2: 1})
        reasons = job.ranks[0].reason() + job.ranks[2].reason()
        self.assertIn("barrier: not finished within 1.0 s", reasons)


if __name__ == "__main__":
    if not os.path.exists(MODULE):
        print("skipped: built without Gloo")
        sys.exit(77)
    unittest.main(verbosity=2)
