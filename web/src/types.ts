// SPDX-License-Identifier: Apache-2.0
// What the JSON API answers (web/openapi.yaml). Numbers that JSON cannot hold travel as "NaN", "Infinity", "-Infinity".

export type Num = number | "NaN" | "Infinity" | "-Infinity";
export type State = "created" | "running" | "finished" | "failed" | "killed" | "lost";
export const STATES: readonly State[] = ["running", "created", "finished", "failed", "killed", "lost"];

export interface Run {
  id: string;
  name: string;
  state: State;
  world_size: number;
  attempt: number;
  model: string;
  dataset: string;
  dataset_hash: string;
  device: string;
  epochs_planned: number;
  created_at: string;
  ended_at: string | null;
  reason: string;
  tags: string[];
  notes: string;
  commit: string;
  batch_per_rank: number;
  has_epochs: boolean;
  last_epoch: number;
  train_loss: Num | null;
  val_loss: Num | null;
  accuracy: Num | null;
  best_accuracy: Num | null;
  best_epoch: number;
  samples_per_s: Num | null;
  elapsed_s: Num;
  elapsed_with_gaps_s: Num;
  time_to_target_s: Num | null;
  verdict?: Verdict; // in lists that asked for it, when a baseline is pinned
  // Only in the answer for one run:
  is_baseline?: boolean;
  config?: [string, string][];
  attempts?: Attempt[];
}

export interface Verdict {
  verdict: "pass" | "fail" | "undecided" | "refused" | "baseline";
  reason: string;
  speedup: Num | null;
  efficiency: Num | null;
}

export interface Attempt {
  attempt: number;
  world_size: number;
  device: string;
  started_at: string;
  ended_at: string | null;
  last_seen_at: string | null;
  elapsed_s: Num;
  offset_s: Num; // elapsed of all earlier attempts
  gap_s: Num;
  reason: string;
}

export interface RunList {
  runs: Run[];
  next_page: string | null;
  target: number;
  baseline: string | null;
  total?: number; // of a sorted list
}

// Columns: entry i of each is the same epoch. null: not evaluated.
export interface Epochs {
  attempt: number[];
  epoch: number[];
  step: number[];
  train_loss: (Num | null)[];
  val_loss: (Num | null)[];
  accuracy: (Num | null)[];
  lr: (Num | null)[];
  samples_per_s: (Num | null)[];
  elapsed_s: (Num | null)[];
  train_s: (Num | null)[];
  eval_s: (Num | null)[];
}

export interface StepSeries {
  name: string;
  rank: number;
  steps: number[];
  values: Num[];
  elapsed_s: Num[];
  attempts: number[];
  total_points: number;
  smoothed?: Num[] | null; // null: more points than one answer reads
}

export interface SeriesAnswer {
  epochs?: Epochs;
  names: string[];
  series: StepSeries[];
}

export interface Checkpoint {
  attempt: number;
  epoch: number;
  step: number;
  filename: string;
  format: string;
  size: number;
  sha256: string;
  accuracy: Num | null;
  created_at: string;
  best: boolean;
}

export interface RunEvent {
  id: number;
  run_id: string;
  kind: string;
  detail: string;
  at: string;
  attempt: number;
  run?: Run;
}

export interface CompareRow {
  run_id: string;
  name: string;
  state: string;
  dataset: string;
  world_size: number;
  epochs: number;
  best_accuracy: Num | null;
  final_accuracy: Num | null;
  total_s: Num | null;
  time_to_target_s: Num | null;
  epochs_to_target: number | null;
  samples_per_s: Num | null;
  speedup: Num | null;
  efficiency: Num | null;
  time_speedup: Num | null;
  refusal: string;
  time_refusal: string;
  differs: string;
  non_finite: string | null;
  threshold_only: boolean;
}

export interface Comparison {
  target: number;
  reference: string;
  rows: CompareRow[];
}

export interface RankBeat {
  attempt: number;
  rank: number;
  step: number;
  elapsed_s: Num;
  points_sent: number;
  points_dropped: number;
  spool_bytes: number;
  points_waiting: number;
  points_replayed: number;
  rss_bytes: number;
  clock_offset_s: Num | null;
  last_seq: number;
  last_seen_at: string | null;
}
export interface RankLate {
  rank: number;
  lateness: number;
  own: number;
  cause: "compute" | "input";
}
export interface Ranks {
  ranks: RankBeat[];
  // Only with bins:
  world_size?: number;
  first_step?: number | null;
  last_step?: number | null;
  sampled?: boolean;
  bin_steps?: number[];
  bin_elapsed_s?: (Num | null)[];
  heat?: { rank: number; compute_s?: (Num | null)[]; allreduce_wait_s?: (Num | null)[]; input_wait_s?: (Num | null)[] }[];
  split?: { rank: number; steps: number; compute_s: Num; allreduce_wait_s: Num; input_wait_s: Num; evaluation_s: Num; checkpoint_s: Num }[];
  verdict?: { state: "abstain" | "even" | "warn" | "critical"; reason: string; step_s: number; from_step: number; to_step: number; late: RankLate[] };
}

export interface Reporter {
  rank: number;
  points_sent: number;
  points_waiting: number;
  points_replayed: number;
  points_dropped: number;
  spool_bytes: number;
  rss_bytes: number;
  clock_offset_s: Num | null;
  last_seen_at: string;
}
export interface Status {
  version: string;
  uptime_s: number;
  cpu_s: number;
  resident_bytes: number;
  streams: number;
  points_stored: number;
  batches_replayed: number;
  commits: number;
  operations: number;
  failed_operations: number;
  queue_depth: number;
  store_bytes: number;
  wal_bytes: number;
  blobs: number;
  blob_bytes: number;
  checkpoints: number;
  epochs: number;
  series: number;
  disk_full: boolean;
  last_error: string;
  runs: Record<State, number>;
  live: { id: string; name: string; world_size: number; ranks: Reporter[] }[];
}
