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
