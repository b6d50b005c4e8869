-- SPDX-License-Identifier: Apache-2.0
-- Which classes an evaluation mistook for which. Kept for a run's newest and best epoch only.
CREATE TABLE confusions (
    run INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE,
    epoch INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    classes INTEGER NOT NULL,
    counts BLOB NOT NULL, -- classes * classes little-endian 32-bit counts, by label, then prediction
    PRIMARY KEY (run, epoch, attempt)
) STRICT, WITHOUT ROWID;
