-- SPDX-License-Identifier: Apache-2.0
-- The run that the others are judged against; at most one.
CREATE TABLE pinned (
    slot INTEGER PRIMARY KEY CHECK (slot = 1),
    run INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE
) STRICT;
