-- SPDX-License-Identifier: Apache-2.0
-- Columns called ..._bits hold a double's 64-bit pattern as an integer: SQLite would turn NaN into NULL.
-- Times (..._ns) are nanoseconds since 1970-01-01 UTC, 0 when absent.

CREATE TABLE runs (
    n INTEGER PRIMARY KEY AUTOINCREMENT, -- order of creation; page tokens rest on it
    id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL UNIQUE,
    state INTEGER NOT NULL,
    world_size INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    model TEXT NOT NULL,
    dataset TEXT NOT NULL,
    dataset_hash TEXT NOT NULL,
    device TEXT NOT NULL,
    source_commit TEXT NOT NULL,
    epochs_planned INTEGER NOT NULL,
    batch_per_rank INTEGER NOT NULL,
    created_ns INTEGER NOT NULL,
    ended_ns INTEGER NOT NULL DEFAULT 0,
    updated_ns INTEGER NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    notes TEXT NOT NULL DEFAULT '',
    -- A digest of the epochs, kept by whoever writes one, so that a list of runs reads one table.
    last_epoch INTEGER NOT NULL DEFAULT 0, -- 0: none
    last_evaluated INTEGER NOT NULL DEFAULT 0,
    train_loss_bits INTEGER NOT NULL DEFAULT 0,
    val_loss_bits INTEGER NOT NULL DEFAULT 0,
    accuracy_bits INTEGER NOT NULL DEFAULT 0,
    samples_per_s_bits INTEGER NOT NULL DEFAULT 0,
    best_epoch INTEGER NOT NULL DEFAULT 0,
    best_accuracy_bits INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX runs_by_state ON runs (state, n);

CREATE TABLE config (
    run INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE,
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (run, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE tags (
    run INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    tag TEXT NOT NULL,
    PRIMARY KEY (run, position)
) STRICT, WITHOUT ROWID;

-- Answers to CreateRun that may be asked for again.
CREATE TABLE requests (
    request_id TEXT NOT NULL PRIMARY KEY,
    run INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE,
    name TEXT NOT NULL, -- as it was asked for
    resumed INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX requests_by_run ON requests (run);

CREATE TABLE attempts (
    run INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    world_size INTEGER NOT NULL,
    device TEXT NOT NULL,
    started_ns INTEGER NOT NULL,
    ended_ns INTEGER NOT NULL DEFAULT 0,
    last_seen_ns INTEGER NOT NULL,
    elapsed_s REAL NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (run, attempt)
) STRICT, WITHOUT ROWID;

CREATE TABLE ranks (
    run INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    elapsed_s REAL NOT NULL,
    step INTEGER NOT NULL,
    points_sent INTEGER NOT NULL,
    points_dropped INTEGER NOT NULL,
    spool_bytes INTEGER NOT NULL,
    last_seen_ns INTEGER NOT NULL,
    PRIMARY KEY (run, attempt, rank)
) STRICT, WITHOUT ROWID;

CREATE TABLE epochs (
    run INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE,
    epoch INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    train_loss_bits INTEGER NOT NULL,
    val_loss_bits INTEGER NOT NULL,
    accuracy_bits INTEGER NOT NULL,
    lr_bits INTEGER NOT NULL,
    samples_per_s_bits INTEGER NOT NULL,
    elapsed_bits INTEGER NOT NULL,
    train_s_bits INTEGER NOT NULL,
    eval_s_bits INTEGER NOT NULL,
    step INTEGER NOT NULL,
    correct INTEGER NOT NULL,
    counted INTEGER NOT NULL,
    no_eval INTEGER NOT NULL,
    PRIMARY KEY (run, epoch, attempt)
) STRICT, WITHOUT ROWID;

CREATE TABLE series (
    n INTEGER PRIMARY KEY,
    run INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE,
    name TEXT NOT NULL,
    rank INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    tail INTEGER NOT NULL DEFAULT 0, -- points in tails
    UNIQUE (run, name, rank, attempt)
) STRICT;

-- The live tail of each series: what one batch brought for it, packed (db/store_block.h) in the order of the batch.
CREATE TABLE tails (
    series INTEGER NOT NULL REFERENCES series (n) ON DELETE CASCADE,
    seq INTEGER NOT NULL, -- of the batch
    first_step INTEGER NOT NULL,
    last_step INTEGER NOT NULL,
    count INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (series, seq)
) STRICT, WITHOUT ROWID;

-- The rest, some hundreds of points each, ordered by (step, seq); blocks of one series may overlap when points came late.
CREATE TABLE blocks (
    n INTEGER PRIMARY KEY,
    series INTEGER NOT NULL REFERENCES series (n) ON DELETE CASCADE,
    first_step INTEGER NOT NULL,
    last_step INTEGER NOT NULL,
    count INTEGER NOT NULL,
    summary BLOB NOT NULL, -- packed: its first and last, lowest and highest point and its first one that is not finite
    data BLOB NOT NULL
) STRICT;
CREATE INDEX blocks_by_step ON blocks (series, first_step, last_step);

-- Which batches are stored, as closed intervals that neither touch nor overlap: usually one per rank and attempt.
CREATE TABLE batches (
    run INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    PRIMARY KEY (run, attempt, rank, first)
) STRICT, WITHOUT ROWID;

-- run_id is no reference: that a run was deleted is an event too.
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    kind TEXT NOT NULL,
    detail TEXT NOT NULL,
    at_ns INTEGER NOT NULL
) STRICT;
CREATE INDEX events_by_run ON events (run_id, id);

CREATE TABLE blobs (
    sha256 TEXT NOT NULL PRIMARY KEY,
    size INTEGER NOT NULL,
    created_ns INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE checkpoints (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    run INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    format TEXT NOT NULL,
    sha256 TEXT NOT NULL REFERENCES blobs (sha256),
    filename TEXT NOT NULL,
    step INTEGER NOT NULL,
    accuracy_bits INTEGER, -- NULL: not given
    created_ns INTEGER NOT NULL,
    UNIQUE (run, attempt, epoch, format, sha256)
) STRICT;
CREATE INDEX checkpoints_by_blob ON checkpoints (sha256);

-- Written and emptied again to see whether a full disk has space once more.
CREATE TABLE probe (
    filler BLOB NOT NULL
) STRICT;
