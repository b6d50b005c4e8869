// SPDX-License-Identifier: Apache-2.0
import assert from "node:assert/strict";
import { test } from "node:test";
import { classAccuracy, differences, points, remaining, shellQuote } from "../src/math.ts";

test("remaining time is the mean of the last five epochs times what is left", () => {
  assert.equal(remaining([1], [10], 4), 30);
  assert.equal(remaining([1, 2, 3, 4, 5, 6, 7], [100, 110, 120, 130, 140, 150, 160], 10), 30);
  assert.equal(remaining([1, 2], [10, 20], 2), 0);
  assert.equal(remaining([], [], 5), null);
  assert.equal(remaining([1, 2], [10, 10], 5), null);
  assert.equal(remaining([1, 2], [10, 20], 0), null);
});

test("a name from outside cannot leave its quotes in the copied command", () => {
  assert.equal(shellQuote("dp-16_a.b"), "dp-16_a.b");
  assert.equal(shellQuote("a b"), "'a b'");
  assert.equal(shellQuote("x'; rm -rf ~ #"), "'x'\\''; rm -rf ~ #'");
  assert.equal(shellQuote("-o"), "'-o'");
  assert.equal(shellQuote(""), "''");
});

test("only options that differ are listed, absent ones as null", () => {
  assert.deepEqual(differences([[["lr", "0.1"], ["seed", "1"]], [["lr", "0.2"], ["seed", "1"], ["x", "y"]]]), [
    { key: "lr", values: ["0.1", "0.2"] },
    { key: "x", values: [null, "y"] },
  ]);
  assert.deepEqual(differences([[["a", "1"]], [["a", "1"]]]), []);
});

test("points keep NaN and drop what was not evaluated", () => {
  assert.deepEqual(points([1, 2, 3, 4], [0.5, null, NaN, Infinity]), { x: [1, 3, 4], y: [0.5, NaN, Infinity] });
  assert.deepEqual(points([null, NaN, 1], [1, 2, 3]), { x: [1], y: [3] });
});

test("a class's accuracy is its share of the diagonal", () => {
  assert.deepEqual(classAccuracy([[3, 1, 0], [0, 0, 0], [2, 2, 4]]), [0.75, null, 0.5]);
  assert.deepEqual(classAccuracy([]), []);
});
