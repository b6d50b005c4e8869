-- SPDX-License-Identifier: Apache-2.0
-- Checkpoints that lie beside the store: their path beneath the register root; empty for a blob of the store's own.
ALTER TABLE blobs ADD COLUMN path TEXT NOT NULL DEFAULT '';

-- What a rank says of itself with each heartbeat.
ALTER TABLE ranks ADD COLUMN points_waiting INTEGER NOT NULL DEFAULT 0;
ALTER TABLE ranks ADD COLUMN points_replayed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE ranks ADD COLUMN rss_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE ranks ADD COLUMN clock_offset_bits INTEGER; -- its wall clock less the sidecar's, in s; NULL: not told

-- The last lines that each rank logged; older ones give way.
CREATE TABLE log_lines (
    run INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    seq INTEGER NOT NULL, -- of the rank's line, from 1
    text TEXT NOT NULL,
    PRIMARY KEY (run, attempt, rank, seq)
) STRICT, WITHOUT ROWID;

-- Step points of the run were thinned out to what every zoom shows of them.
ALTER TABLE runs ADD COLUMN rolled_up INTEGER NOT NULL DEFAULT 0;
