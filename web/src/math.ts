// SPDX-License-Identifier: Apache-2.0
// Arithmetic without a page, tested by test/math.test.ts.

// Seconds until the last planned epoch, from the mean of the last (at most five) epochs; null: cannot be said.
export function remaining(epochs: readonly number[], elapsed: readonly number[], planned: number): number | null {
  const count = epochs.length;
  const last = epochs[count - 1];
  if (last === undefined || planned <= 0) return null;
  if (last >= planned) return 0;
  const from = Math.max(0, count - 6);
  let [first, start] = [epochs[from] ?? 0, elapsed[from] ?? 0];
  if (count === 1) [first, start] = [0, 0];
  const end = elapsed[count - 1] ?? 0;
  const done = last - first;
  if (done <= 0 || !(end > start)) return null;
  return ((end - start) / done) * (planned - last);
}

// A value for a POSIX shell: left alone when harmless, else in single quotes.
export function shellQuote(text: string): string {
  return /^[A-Za-z0-9_./:@%+=,][A-Za-z0-9_./:@%+=,-]*$/.test(text) ? text : `'${text.replace(/'/g, "'\\''")}'`;
}

// Rows of a table of configurations that are not the same in all runs.
export function differences(configs: readonly (readonly [string, string][])[]): { key: string; values: (string | null)[] }[] {
  const maps = configs.map((config) => new Map(config));
  const keys = [...new Set(maps.flatMap((map) => [...map.keys()]))].sort();
  return keys
    .map((key) => ({ key, values: maps.map((map) => map.get(key) ?? null) }))
    .filter(({ values }) => values.some((value) => value !== values[0]));
}

// Points (x, y) with what is not there (null) left out and what is not a number kept as NaN.
export function points(x: readonly (number | null)[], y: readonly (number | null)[]): { x: number[]; y: number[] } {
  const out = { x: [] as number[], y: [] as number[] };
  for (let i = 0; i < y.length; i++) {
    const [a, b] = [x[i], y[i]];
    if (a === null || a === undefined || !Number.isFinite(a) || b === null || b === undefined) continue;
    out.x.push(a);
    out.y.push(b);
  }
  return out;
}

// The share of each row that lies on the diagonal; null for a class without images.
export function classAccuracy(counts: readonly (readonly number[])[]): (number | null)[] {
  return counts.map((row, i) => {
    const all = row.reduce((sum, count) => sum + count, 0);
    return all ? (row[i] ?? 0) / all : null;
  });
}

// Exponential average over all points, its start corrected for the missing past (a constant stays constant). What is not
// a number passes through and leaves the average alone. The same arithmetic as ps_compare_smooth (services/compare).
export function smooth(values: readonly number[], weight: number): number[] {
  let [average, mass] = [0, 0];
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    average = weight * average + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mass > 0 ? average / mass : value;
  });
}

// Elapsed time at the end of the first evaluation at or above the target; null: none. As services/compare counts it.
export function timeToTarget(elapsed: readonly (number | null)[], accuracy: readonly (number | null)[], target: number): { time: number; index: number } | null {
  for (let i = 0; i < accuracy.length; i++) {
    const [a, e] = [accuracy[i], elapsed[i]];
    if (a !== null && a !== undefined && Number.isFinite(a) && a >= target && e !== null && e !== undefined) return { time: e, index: i };
  }
  return null;
}

// Speed-up and efficiency of N processes against a reference of M: rate / reference, and that * M / N.
export function scaling(rate: number, world: number, reference: number, referenceWorld: number): { speedup: number; efficiency: number } | null {
  if (!(rate > 0 && reference > 0 && world > 0 && referenceWorld > 0)) return null;
  const speedup = rate / reference;
  return { speedup, efficiency: (speedup * referenceWorld) / world };
}

// The points of a coarse series outside of [from, to] and those of a detailed one inside, by step.
export function mergeSteps<T extends { step: number }>(coarse: readonly T[], detail: readonly T[], from: number, to: number): T[] {
  return [...coarse.filter((p) => p.step < from), ...detail.filter((p) => p.step >= from && p.step <= to), ...coarse.filter((p) => p.step > to)];
}

export interface Table {
  x: number[];
  names: string[];
  columns: (number | null)[][]; // null: this line has no point there
}

// Lines with x of their own as one table; several points of a line at one x take rows of their own.
export function tableOf(lines: readonly { label: string; x: readonly number[]; y: readonly number[] }[]): Table {
  const rows = new Map<string, { x: number; again: number; values: (number | null)[] }>();
  lines.forEach((line, column) => {
    const seen = new Map<number, number>();
    line.x.forEach((x, i) => {
      const again = seen.get(x) ?? 0;
      seen.set(x, again + 1);
      const key = `${x}/${again}`;
      let row = rows.get(key);
      if (!row) rows.set(key, (row = { x, again, values: lines.map(() => null) }));
      row.values[column] = line.y[i] ?? NaN;
    });
  });
  const sorted = [...rows.values()].sort((a, b) => a.x - b.x || a.again - b.again);
  return { x: sorted.map((row) => row.x), names: lines.map((line) => line.label), columns: lines.map((_, c) => sorted.map((row) => row.values[c] ?? null)) };
}

// RFC 4180. A name that a spreadsheet would take for a formula gets an apostrophe before it.
export function csvOf(x: string, table: Table): string {
  const field = (text: string): string => {
    const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
  };
  const lines = [[x, ...table.names].map(field).join(",")];
  table.x.forEach((value, i) => lines.push([String(value), ...table.columns.map((column) => (column[i] === null ? "" : String(column[i])))].join(",")));
  return lines.join("\r\n") + "\r\n";
}
