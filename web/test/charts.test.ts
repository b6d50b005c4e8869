// SPDX-License-Identifier: Apache-2.0
// Known answers for what the charts compute: smoothing, scaling, time to target, zooming in, tables.
import assert from "node:assert/strict";
import { test } from "node:test";
import { isElected } from "../src/live.ts";
import { csvOf, mergeSteps, scaling, smooth, tableOf, timeToTarget } from "../src/math.ts";
import { toChinese } from "../src/server.ts";

const near = (a: number, b: number): void => assert.ok(Math.abs(a - b) < 1e-12, `${a} is not ${b}`);

test("smoothing corrects its start: by hand, weight 0.5", () => {
  // averages 0.5, 1.75, 3.375; masses 0.5, 0.75, 0.875
  const got = smooth([1, 3, 5], 0.5);
  near(got[0] ?? NaN, 1);
  near(got[1] ?? NaN, 1.75 / 0.75);
  near(got[2] ?? NaN, 3.375 / 0.875);
});

test("a constant stays constant, what is no number passes through and changes nothing after it", () => {
  for (const value of smooth([2, 2, 2, 2], 0.9)) near(value, 2);
  const [with_, without] = [smooth([1, NaN, 3, Infinity, 5], 0.7), smooth([1, 3, 5], 0.7)];
  assert.ok(Number.isNaN(with_[1]) && with_[3] === Infinity);
  assert.deepEqual([with_[0], with_[2], with_[4]], without);
  assert.deepEqual(smooth([4, 8], 0), [4, 8]);
  assert.deepEqual(smooth([], 0.9), []);
});

test("time to target is the end of the first evaluation that reaches it", () => {
  assert.deepEqual(timeToTarget([10, 20, 30, 40], [0.5, 0.79999, 0.8, 0.7], 0.8), { time: 30, index: 2 });
  assert.deepEqual(timeToTarget([10, 20, 30], [null, NaN, 0.9], 0.8), { time: 30, index: 2 });
  assert.equal(timeToTarget([10, 20], [0.5, 0.6], 0.8), null);
  assert.equal(timeToTarget([], [], 0.8), null);
});

test("the sample's 60 and 20 minutes on 1 and 16 cards are a speed-up of 3 and an efficiency of 18.75 %", () => {
  const sample = scaling(100 / 20, 16, 100 / 60, 1);
  near(sample?.speedup ?? NaN, 3);
  near(sample?.efficiency ?? NaN, 0.1875);
  assert.deepEqual(scaling(1900, 2, 1000, 1), { speedup: 1.9, efficiency: 0.95 });
  assert.deepEqual(scaling(400, 8, 250, 4), { speedup: 1.6, efficiency: 0.8 });
  assert.equal(scaling(0, 2, 1000, 1), null);
  assert.equal(scaling(NaN, 2, 1000, 1), null);
});

test("zooming in puts the finer points in place of the coarse ones between them", () => {
  const p = (...steps: number[]): { step: number }[] => steps.map((step) => ({ step }));
  assert.deepEqual(mergeSteps(p(0, 10, 20, 30, 40), p(10, 12, 14, 20, 22, 30), 10, 30), p(0, 10, 12, 14, 20, 22, 30, 40));
  assert.deepEqual(mergeSteps(p(0, 10), [], 3, 5), p(0, 10));
  assert.deepEqual(mergeSteps(p(0, 10), p(0, 5, 10), 0, 10), p(0, 5, 10));
});

test("lines with x of their own become one table, repeated x rows of their own", () => {
  const table = tableOf([{ label: "a", x: [1, 2, 2], y: [10, 20, 21] }, { label: "b", x: [2, 3], y: [NaN, 30] }]);
  assert.deepEqual(table.x, [1, 2, 2, 3]);
  assert.deepEqual(table.columns, [[10, 20, 21, null], [null, NaN, null, 30]]);
});

test("CSV quotes what it must, and a name is no formula", () => {
  const text = csvOf("step", { x: [1, 2], names: ['=cmd|"x"', "a,b"], columns: [[0.5, null], [NaN, 1e-7]] });
  assert.equal(text, `step,"'=cmd|""x""","a,b"\r\n1,0.5,NaN\r\n2,,1e-7\r\n`);
});

test("of the tabs that were heard of lately the oldest reads", () => {
  const heard = new Map([["a", 1000], ["c", 9000]]);
  assert.equal(isElected("b", heard, 9500), true); // "a" is silent, "c" is younger
  assert.equal(isElected("b", new Map([["a", 8000]]), 9500), false);
  assert.equal(isElected("b", new Map(), 0), true);
});

test("the server's sentences in Chinese; what is not known stays", () => {
  assert.equal(toChinese("other data: hash abc, single has def"), "数据不同：摘要 abc，single 为 def");
  assert.equal(toChinese("not heard of for 12.3 s"), "已 12.3 秒 没有消息");
  assert.equal(toChinese("time to 80 % against baseline: 6 min 00 s (epoch 9; before: 5 min, 79 %); wanted: at most 5 min 52 s (1.1 times)"), "达到 80 % 用时：6 分 00 秒，要求不超过 5 分 52 秒");
  assert.equal(toChinese("run has finished: running; wanted: finished"), "运行尚未完成：运行中");
  assert.equal(toChinese('run "x" is alive (running): end it before deleting it'), "运行“x”还在进行（运行中）：请先结束再删除");
  assert.equal(toChinese("epoch 3: train loss 0.5, loss 0.6, accuracy 0.7"), "第 3 轮：训练损失 0.5，验证损失 0.6，准确率 0.7");
  assert.equal(toChinese("something else"), "something else");
});
