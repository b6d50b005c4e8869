# SPDX-License-Identifier: Apache-2.0
"""Does the suite notice? One line of the training's arithmetic is made wrong at a time, in a copy of the tree; the tests named
beside it are built and run, and at least one must fail. Prints a table and ends with 1 if a mutation survives.

    /usr/bin/python3 tests/mutation/run.py [WORD]     only mutations whose line holds WORD

Takes some minutes and is not part of the default suite; its last result stands in tests/README.md. The reference backend's
ops have their own mutations, run in the suite: tests/unit/test_backend_mutation.c."""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).resolve().parents[2]
REF, CPU, DIST = "trainer/backend/ref/", "trainer/backend/cpu/", "trainer/dist/"
BACKEND = ["test_backend_cpu"]

# file, what stands there (once), what is put there, tests. "parallel:CASE" is a case of tests/integration/parallel_test.py.
MUTATIONS = [
    (CPU + "layers.c", "k0[l] = j->batch ? (float)(sum / count) : 0;", "k0[l] = j->batch ? (float)(-sum / count) : 0;", BACKEND),
    (CPU + "layers.c", "k1[l] = j->batch ? (float)(dot * (double)inverse[l] / count) : 0;", "k1[l] = 0;", BACKEND),
    (CPU + "layers.c", "(j->accumulate ? j->dscale[c] : 0) + (float)dot;", "(j->accumulate ? j->dscale[c] : 0) - (float)dot;", BACKEND),
    (CPU + "layers.c", "(j->accumulate ? j->dshift[c] : 0) + (float)sum;", "(float)sum;", BACKEND),
    (CPU + "layers.c", "dx[at + (size_t)l] += dy[l];", "dx[at + (size_t)l] -= dy[l];", BACKEND),
    (CPU + "layers.c", "                                open[l] = false;\n", "", BACKEND),
    (CPU + "layers.c", "share[l] = dy[block * b + l] / (float)hw;", "share[l] = dy[block * b + l];", BACKEND),
    (CPU + "layers.c", "(float)((double)config->grad_scale * (p - target));", "(float)((double)config->grad_scale * p);", BACKEND),
    (CPU + "kernels_block.h", "out[j] = factor * (g[j] - c0 - (p[j] - centre) * c1);", "out[j] = factor * (g[j] - c0 + (p[j] - centre) * c1);", BACKEND),
    (CPU + "kernels_block.h", "            dot += d0 * (p[j] - centre);\n            dot1", "            dot += d0 * p[j];\n            dot1", BACKEND),
    (CPU + "kernels_block.h", "                d0 += b[j];\n                d1 += b[j + 1];", "                d0 += b[j];", BACKEND),
    (CPU + "kernels.c", "dx[i] = y[i] <= 0 ? 0 : dy[i];", "dx[i] = dy[i];", BACKEND),
    (CPU + "cpu.c", "db[k] = (accumulate ? db[k] : 0) + (float)sum;", "db[k] = (float)sum;", BACKEND),
    (CPU + "cpu.c", "accumulate ? &b->convs[i].unpack_add : &b->convs[i].unpack", "&b->convs[i].unpack", BACKEND),
    ("trainer/backend/bn_exchange.c", "all[c + k] += m[c + k] + delta * delta * before * part / total;", "all[c + k] += m[c + k];", ["parallel:sync_bn"]),
    ("trainer/backend/bn_exchange.c", "all[k] += delta * part / total;", "all[k] += delta;", ["parallel:sync_bn"]),
    ("trainer/backend/bn_exchange.c", "                all[k] += m[k];\n", "", ["parallel:sync_bn"]),
    ("trainer/backend/bn_exchange.c", "                all[c + k] += m[c + k];\n", "", ["parallel:sync_bn"]),
    (DIST + "reducer.c", "r->share = (float)share;", "r->share = 1;", ["test_reducer"]),
    (DIST + "reducer.c", "r->grads + p->offset, p->count, r->share,", "r->grads + p->offset, p->count, 1.0f,", ["test_reducer"]),
    (DIST + "reducer.c", "r->memory + r->place[p - r->model->params], p->count, 1.0f, err);", "r->memory + r->place[p - r->model->params], p->count, 0.5f, err);", ["test_reducer"]),
    (DIST + "reducer.c", "while (r->full < r->bucket_count && r->buckets[r->full].pending == 0)", "while (r->full < r->bucket_count && r->buckets[r->full].pending <= 1)", ["test_reducer"]),
    (DIST + "reducer.c", "bytes >= (r->bucket_count == 0 ? first_limit : limit)", "bytes >= limit", ["test_reducer"]),
    (DIST + "local.c", "for (int r = 1; r < world; r++)", "for (int r = 2; r < world; r++)", ["test_local"]),
    ("trainer/loop.c", "ps_reducer_begin(l->reducer, 1.0 / l->world);", "ps_reducer_begin(l->reducer, 1.0);", ["parallel:frozen"]),
    ("trainer/loop.c", "c->ops->backward(c->backend, k > 0, NULL,", "c->ops->backward(c->backend, false, NULL,", ["parallel:accumulate"]),
    ("trainer/loop.c", "i < c->data->test.count; i += (size_t)l->world)", "i + 1 < c->data->test.count; i += (size_t)l->world)", ["parallel:evaluation"]),
    ("trainer/data/sampler.c", "(i * (size_t)s->world_size + (size_t)s->rank) % s->count", "(i + (size_t)s->rank * length) % s->count", ["test_sampler"]),
    ("trainer/data/sampler.c", "ps_mt19937_next(&mt) % (n - i)", "ps_mt19937_next(&mt) % n % (n - i)", ["test_sampler"]),
    ("trainer/data/sampler.c", "ps_randperm(s->seed + (uint64_t)epoch, order, s->count);", "ps_randperm(s->seed, order, s->count);", ["test_sampler"]),
    ("trainer/data/sampler.c", "(s->count + w - 1) / w", "s->count / w", ["test_sampler"]),
    ("trainer/optim/optim.c", "p[i] -= lr * (d + momentum * b[i]);", "p[i] -= lr * b[i];", ["test_optim"]),
    ("trainer/optim/optim.c", "        b[i] = momentum * b[i] + d;\n        p[i] -= lr * b[i];", "        b[i] = momentum * b[i] - d;\n        p[i] -= lr * b[i];", ["test_optim"]),
    ("trainer/optim/optim.c", "v[i] = beta2 * v[i] + rest2 * d * d;", "v[i] = beta2 * v[i] + rest2 * d;", ["test_optim"]),
    ("trainer/optim/optim.c", "p[i] -= rate * m[i] / (sqrtf(v[i]) / root + eps);", "p[i] -= rate * m[i] / (sqrtf(v[i]) + eps);", ["test_optim"]),
    ("trainer/optim/optim.c", "float decay = q->decay ? (float)s->weight_decay : 0;", "float decay = (float)s->weight_decay;", ["test_optim"]),
]


def run(command, where, env=None, limit=600):
    return subprocess.run(command, cwd=where, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=limit)


def main():
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [m for m in MUTATIONS if word in m[0] + m[1]]
    work = pathlib.Path(tempfile.mkdtemp(prefix="ps-mutation-"))
    try:
        tree, build = work / "tree", work / "build"
        files = run(["git", "ls-files", "-z"], SOURCE).stdout.split("\0")
        for name in filter(None, files):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(SOURCE / name, tree / name)
        for file, old, _, _ in chosen:
            found = (tree / file).read_text().count(old)
            assert found == 1, f"{file}: {found} places instead of one: {old}"
        launcher = [f"-DCMAKE_{c}_COMPILER_LAUNCHER=ccache" for c in ("C", "CXX")] if shutil.which("ccache") else []
        done = run(["cmake", "-S", tree, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DPARAMSYNC_SERVICES=OFF",
                    *launcher], work)
        assert done.returncode == 0, done.stdout
        done = run(["ninja", "-j2"], build, limit=1800)
        assert done.returncode == 0, done.stdout[-3000:]
        env = {"PS_BIN": str(build / "bin"), "PS_BUILD": str(build), "PS_SOURCE": str(tree), "OMP_NUM_THREADS": "2"}

        def fails(tests):
            """The first test that fails, or None."""
            for test in tests:
                kind, _, case = test.partition(":")
                command = ["/usr/bin/python3", tree / "tests/integration/parallel_test.py", case] if case else [build / "tests" / kind]
                try:
                    if run(command, work, env).returncode not in (0, 77):
                        return test
                except subprocess.TimeoutExpired:
                    return test
            return None

        everything = sorted({t for m in chosen for t in m[3]})
        assert fails(everything) is None, "the tests fail without a mutation"
        survived = 0
        for file, old, new, tests in chosen:
            path = tree / file
            text = path.read_text()
            path.write_text(text.replace(old, new))
            built = run(["ninja", "-j2"], build, limit=900)
            killer = "does not build" if built.returncode else fails(tests)
            path.write_text(text)
            survived += killer is None
            print(f"{'killed by ' + killer if killer else 'SURVIVED':32} {file}: {' '.join(old.split())[:90]}", flush=True)
        print(f"{len(chosen) - survived} of {len(chosen)} mutations were noticed")
        return 1 if survived else 0
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
