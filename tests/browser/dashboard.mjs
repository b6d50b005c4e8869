// SPDX-License-Identifier: Apache-2.0
// What a reader sees, checked in Chromium; started by dashboard.py with the facts as JSON.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createServer, request } from "node:http";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { open } from "./chromium.mjs";

const facts = JSON.parse(process.argv[2]);
const { url, ids } = facts;
const answers = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const act = async (...words) => {
  console.log(["do", ...words].join(" "));
  await answers.next();
};
const shot = (page, name) => page.screenshot({ path: join(facts.shots, `${name}.png`), fullPage: true });
const compareUrl = `${url}#/compare?runs=${ids.single},${ids.double}`;

// Something was drawn: pixels that are not see-through, in more than a few places.
const drawn = (page, selector = "canvas") => page.locator(selector).evaluateAll((all) => all.map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 3; i < data.length; i += 4) if (data[i] > 0) count++;
  return count;
}));

// Loads in another page on another address so that nothing is carried over; fails on any error of the page.
const problems = [];
const watch = (page) => {
  page.on("pageerror", (error) => problems.push(`page error: ${error.message}`));
  page.on("console", (message) => {
    // A server that was stopped on purpose makes the browser complain about the network.
    if (message.type() === "error" && !/net::ERR_|Failed to load resource/.test(message.text())) problems.push(`console: ${message.text()}`);
  });
  return page;
};

const steps = {
  async "the list shows what was recorded"(page) {
    await page.goto(url);
    const row = (id) => page.locator(`tr[data-run="${id}"]`);
    await row(ids.single).waitFor();
    assert.equal(await page.locator("tr[data-run]").count(), 5);
    const single = facts.runs.single;
    const cell = (id, column) => row(id).locator(`td[data-column="${column}"]`).innerText();
    assert.match(await cell(ids.single, "state"), /finished/);
    assert.match(await cell(ids.single, "epoch"), /20 \/ 20/);
    assert.ok((await cell(ids.single, "accuracy")).startsWith((single.accuracy * 100).toFixed(2) + " %"));
    assert.equal(await cell(ids.single, "loss"), single.val_loss.toFixed(4));
    assert.match(await cell(ids.single, "ttt"), /min \d\d s$/);
    assert.match(await cell(ids.bad, "accuracy"), /NaN/);
    assert.equal(await cell(ids.bad, "loss"), "∞");
    assert.match(await cell(ids.double, "world"), /^2\s+CPU, 2 threads$/);
    await shot(page, "runs-light");
  },
  async "a hostile name is text"(page) {
    const name = page.locator(`tr[data-run="${ids.bad}"] th a`);
    assert.equal(await name.textContent(), facts.hostile);
    await name.click();
    await page.locator("h1", { hasText: "<img" }).waitFor();
    await page.locator(".config dd", { hasText: "<img" }).waitFor();
    await shot(page, "run-hostile");
    await page.goto(`${url}#/compare?runs=${ids.single},${ids.bad}`);
    await page.locator(".card-refused").waitFor();
    assert.match(await page.locator(".card-refused").innerText(), /not compared/i);
    assert.equal(await page.locator('main img, [src="x"]').count(), 0);
    assert.equal(await page.evaluate(() => window.hacked), undefined);
    await shot(page, "compare-refused");
  },
  async "search, filter, sort and selection live in the address"(page) {
    await page.goto(url);
    await page.locator("tr[data-run]").first().waitFor();
    await page.locator("#search").fill("DP-2");
    await page.waitForFunction(() => document.querySelectorAll("tr[data-run]").length === 1);
    assert.match(page.url(), /q=DP-2/);
    await page.locator("#search").fill("");
    await page.waitForFunction(() => document.querySelectorAll("tr[data-run]").length === 5);
    await page.getByRole("button", { name: "failed", exact: true }).click();
    await page.waitForFunction(() => document.querySelectorAll("tr[data-run]").length === 1);
    await page.getByRole("button", { name: "All", exact: true }).click();
    await page.waitForFunction(() => document.querySelectorAll("tr[data-run]").length === 5);
    await page.getByRole("button", { name: "img/s" }).click();
    await page.waitForFunction(() => { // the server sorts
      const rates = [...document.querySelectorAll('td[data-column="rate"]')].map((cell) => Number(cell.innerText.replace(/\s/g, "")));
      return document.querySelector('th[aria-sort="ascending"]') && rates.length === 5 && rates.every((rate, i) => !i || rate >= rates[i - 1]);
    });
    // By keyboard alone: a box is reached and switched with the space bar.
    await page.locator(`#pick-${ids.single}`).focus();
    await page.keyboard.press("Space");
    await page.locator(`#pick-${ids.double}`).check();
    await page.reload();
    await page.locator(`#pick-${ids.double}:checked`).waitFor();
    await page.getByRole("link", { name: "Compare 2 runs" }).click();
    await page.locator("table.figures").waitFor();
  },
  async "the comparison shows the server's figures and draws them"(page) {
    await page.goto(compareUrl);
    const [, two] = facts.compare;
    const cells = await page.locator('tr[data-row="dp-2"] td').allInnerTexts();
    assert.ok(cells.includes(two.speedup.toFixed(2) + "×"), cells.join("|"));
    assert.ok(cells.includes((two.efficiency * 100).toFixed(1) + " %"), cells.join("|"));
    assert.ok(cells.includes((two.best_accuracy * 100).toFixed(2) + " %"), cells.join("|"));
    assert.ok(cells.includes(String(two.epochs_to_target)), cells.join("|"));
    assert.equal(await page.locator(".card .figure").first().innerText(), two.speedup.toFixed(2) + "×");
    assert.equal(await page.locator("canvas").count(), 6);
    for (const count of await drawn(page)) assert.ok(count > 1000, `only ${count} pixels`);
    assert.match(await page.locator(".diff").innerText(), /lr\s+0\.01\s+0\.02/);
    await page.goto(`${url}#/compare?runs=${ids.single},${ids.sixteen}`);
    await page.locator('tr[data-plan="dp-16"]').waitFor();
    assert.match(await page.locator('tr[data-plan="dp-16"]').innerText(), /108\.0 ms\s+13\d\.\d ms[^]*81\.0 %\s+7\d\.\d %/);
    await page.goto(compareUrl);
    await page.locator('tr[data-row="dp-2"]').waitFor();
    await shot(page, "compare-light");
    // Published results: a threshold and one mark, never a curve.
    const before = await page.locator(".plot").first().getAttribute("aria-label");
    await page.locator("#sample-1").check();
    await page.locator('tr[data-row="sample-1"]').waitFor();
    const sample = await page.locator('tr[data-row="sample-1"] td').allInnerTexts();
    assert.ok(sample.includes("1 h 00 min") && !sample.some((text) => /×|min \d\d s/.test(text)), sample.join("|"));
    assert.equal(await page.locator(".plot").first().getAttribute("aria-label"), before);
    await page.locator("#sample-16").check();
    await page.locator('tr[data-row="sample-16"]').waitFor();
    await shot(page, "compare-samples");
    // Another target: asked of the server again.
    await page.locator("#target").fill("99");
    await page.getByRole("button", { name: "Apply" }).click();
    await page.waitForFunction(() => /not reached/.test(document.querySelector('tr[data-row="dp-2"]').innerText));
  },
  async "a run's page has curves, checkpoints and a command to pull"(page) {
    await page.goto(`${url}#/run/${ids.double}`);
    await page.locator("canvas").nth(4).waitFor();
    for (const count of await drawn(page)) assert.ok(count > 500, `only ${count} pixels`);
    assert.match(await page.locator(".command code").first().innerText(), new RegExp(`^paramsync pull dp-2 --epoch 20 -o epoch_20\\.safetensors --sidecar 127\\.0\\.0\\.1:${facts.grpc}$`));
    const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("link", { name: /^Download/ }).first().click()]);
    assert.equal(download.suggestedFilename(), "epoch_20.safetensors");
    assert.match(await page.locator(".note:visible").allInnerTexts().then((all) => all.join()), /not numbers/);
    for (const axis of ["Step", "Elapsed", "Clock time"]) {
      await page.getByRole("button", { name: axis, exact: true }).click();
      for (const count of await drawn(page)) assert.ok(count > 500, `${axis}: only ${count} pixels`);
    }
    await shot(page, "run-light");
    await page.locator(".plot").first().focus();
    await page.keyboard.press("ArrowRight");
    await page.waitForFunction(() => document.querySelector(".legend-value")?.textContent.includes("@"));
  },
  async "the rank that the others wait for is named and shown"(page) {
    await page.goto(`${url}#/run/${ids.sixteen}`);
    await page.locator(".verdict-critical", { hasText: "Rank 5 holds the others up" }).waitFor(); // on the first page, too
    await page.getByRole("link", { name: "Ranks", exact: true }).click();
    await page.locator(".heat").first().waitFor();
    await page.getByText("Rank 5 holds the others up").waitFor();
    assert.equal(await page.locator(".heat").count(), 2);
    for (const count of await drawn(page, ".heat canvas")) assert.ok(count > 10000, `only ${count} pixels`);
    assert.equal(await page.locator(".stacks .bar-row").count(), 16);
    // By keyboard: the cell's figure is written out.
    await page.locator(".heat").first().focus();
    for (let i = 0; i < 5; i++) await page.keyboard.press("ArrowDown");
    await page.keyboard.press("ArrowRight");
    assert.match(await page.locator(".heat-under").first().innerText(), /^rank 4 · Step \d+.* · 100 ms$/);
    await shot(page, "ranks-light");
    await page.goto(`${url}#/run/${ids.single}/ranks`);
    await page.getByText("cannot be said").waitFor();
  },
  async "a chart is saved as picture and as data, smoothed and zoomed into"(page) {
    const asked = [];
    page.on("request", (request) => request.url().includes("/series?name=loss") && asked.push(request.url()));
    await page.goto(`${url}#/run/${ids.double}`);
    await page.getByText("2000 of 4000 points").or(page.getByText(/\d+ of 4000 points/)).waitFor();
    const figure = page.locator("figure", { has: page.getByText("loss", { exact: true }) }).last();
    const save = async (kind, scope = figure) => {
      await scope.locator(".export summary").click();
      const [download] = await Promise.all([page.waitForEvent("download"), scope.getByRole("button", { name: kind, exact: true }).click()]);
      assert.equal(download.suggestedFilename().split(".").pop(), kind.toLowerCase());
      return readFileSync(await download.path());
    };
    const csv = (await save("CSV")).toString().trim().split("\r\n");
    assert.equal(csv[0], "step,rank 0");
    assert.ok(csv.length > 1000 && csv.some((line) => line === "300,NaN"), csv.slice(0, 3).join());
    const json = JSON.parse(await save("JSON"));
    assert.equal(json.lines[0].x.length, csv.length - 1);
    assert.equal((await save("PNG")).subarray(1, 4).toString(), "PNG");
    const drawing = (await save("SVG", page.locator("figure").first())).toString();
    assert.match(drawing, /^<\?xml[^]*<path d="M[\d.]+ [\d.]+L[^]*<\/svg>\s*$/);
    assert.match(drawing, /Training loss/);
    // Smoothed over all points by the server; the raw line stays.
    await page.locator("#smooth").fill("0.9");
    await page.waitForFunction(() => location.hash.includes("smooth=0.9"));
    await page.waitForTimeout(600);
    assert.ok(asked.some((one) => one.includes("smooth=0.9")), asked.join("\n"));
    assert.equal(JSON.parse(await save("JSON")).lines.length, 2);
    // Zoomed: the part in view comes with all its points.
    const plot = figure.locator(".u-over");
    await plot.scrollIntoViewIfNeeded();
    const box = await plot.boundingBox();
    await page.mouse.move(box.x + box.width * 0.4, box.y + 80);
    await page.mouse.down();
    await page.mouse.move(box.x + box.width * 0.5, box.y + 90, { steps: 4 });
    await page.mouse.up();
    await page.getByText(/points in view/).waitFor();
    const [, shown, all] = /(\d+) of (\d+) points in view/.exec(await figure.locator("xpath=..").locator("xpath=..").innerText());
    assert.ok(shown === all && Number(all) > 300 && Number(all) < 700, `${shown} of ${all}`);
    await shot(page, "run-zoomed");
    await plot.dblclick();
    await page.getByText(/^\d+ of 4000 points/).waitFor();
  },
  async "the health page tells of the sidecar and of each rank's reporter"(page) {
    await act("beat");
    await page.goto(url);
    await page.getByRole("link", { name: "Health" }).click();
    await page.getByText("All is well").waitFor();
    const row = page.locator("table tr", { hasText: "rank 1" });
    assert.match(await row.innerText(), /1234[^]*7[^]*3[^]*\+1 h 00 min/);
    await shot(page, "health-light");
    await page.goto(`${url}#/run/${ids.live}`);
    await page.getByText("a line of <b>rank 1</b>").waitFor({ state: "attached" });
  },
  async "a real training appears, moves and ends without a reload"(page) {
    await page.goto(url);
    await page.locator(".live-live").waitFor();
    await act("train");
    await page.getByRole("link", { name: "real-training" }).click({ timeout: 60000 });
    await page.getByText("epoch 2 of 2", { exact: true }).waitFor({ timeout: 120000 });
    await act("trained");
    await page.locator(".badge-finished").waitFor();
    await page.locator("td.full", { hasText: "epoch_2.safetensors" }).first().waitFor();
    assert.ok(await page.locator("select#series option", { hasText: "evaluation_s" }).count(), "the new series is there");
    await shot(page, "run-real");
  },
  async "tags and notes are edited, a run is pinned and judged, another is deleted"(page) {
    await page.goto(`${url}#/run/${ids.double}`);
    await page.getByRole("button", { name: "Edit tags and notes" }).click();
    await page.locator("#edit-tags").fill("nightly, two cards,nightly");
    await page.locator("#edit-notes").fill("first line\n<script>alert(1)</script>");
    await shot(page, "edit-dialog");
    await page.getByRole("button", { name: "Save" }).click();
    await page.locator("dialog").waitFor({ state: "detached" });
    await page.getByText("<script>alert(1)</script>").waitFor();
    assert.deepEqual(await page.locator("dd a.tag").allInnerTexts(), ["nightly", "two cards"]);
    await page.goto(`${url}#/run/${ids.single}`);
    await page.getByRole("button", { name: "Pin as baseline" }).click();
    await page.getByRole("button", { name: "Unpin baseline" }).waitFor();
    await page.goto(url);
    const verdict = (id) => page.locator(`tr[data-run="${id}"] td[data-column="verdict"]`);
    await verdict(ids.single).getByText("baseline").waitFor();
    assert.match(await verdict(ids.double).innerText(), /pass\s+1\.\d\d×/);
    assert.match(await verdict(ids.bad).innerText(), /other job/);
    // Columns are the reader's own, and stay.
    await page.locator(".menu summary").click();
    await page.locator("#col-tags").check();
    await page.locator("#col-loss").uncheck();
    await page.keyboard.press("Escape");
    await page.locator(`tr[data-run="${ids.double}"] td[data-column="tags"]`).getByText("two cards").click();
    await page.waitForFunction(() => document.querySelectorAll("tr[data-run]").length === 1);
    assert.match(page.url(), /tag=two\+?(%20)?cards/);
    await page.goto("about:blank");
    await page.goto(url);
    await page.locator('td[data-column="tags"]').first().waitFor();
    assert.equal(await page.locator('td[data-column="loss"]').count(), 0);
    await page.locator(".menu summary").click();
    await page.locator("#col-tags").uncheck();
    await page.locator("#col-loss").check();
    // Deleting asks first.
    await act("create-ended", "to-be-deleted");
    await page.getByRole("link", { name: "to-be-deleted" }).click();
    await page.getByRole("button", { name: "Delete" }).click();
    await page.getByRole("button", { name: "Cancel" }).click();
    await page.getByRole("button", { name: "Delete" }).click();
    await page.locator("dialog").getByRole("button", { name: "Delete" }).click();
    await page.locator(`tr[data-run="${ids.double}"]`).waitFor();
    await page.waitForFunction(() => ![...document.querySelectorAll("tr[data-run]")].some((row) => row.innerText.includes("to-be-deleted")));
  },
  async "a long list makes rows for what is in view and fetches as it scrolls"(page) {
    await act("many", 600);
    await page.goto(`${url}#/?q=many-&sort=name`);
    await page.getByText("600 runs").waitFor();
    const made = () => page.locator("tr[data-run]").count();
    assert.ok(await made() < 80, `${await made()} rows`);
    await page.getByText("many-0000").waitFor();
    for (const at of [0.3, 0.7, 1]) {
      await page.evaluate((share) => window.scrollTo(0, document.documentElement.scrollHeight * share), at);
      await page.waitForFunction(() => {
        const rows = [...document.querySelectorAll("tr[data-run]")].map((row) => row.getBoundingClientRect()).filter((box) => box.bottom > 120 && box.top < innerHeight - 200);
        return rows.length > 4 && !document.querySelector("tr.waiting");
      });
      assert.ok(await made() < 80, `${await made()} rows`);
    }
    await page.getByText("many-0599").waitFor();
    assert.equal(await page.locator("table.runs").getAttribute("aria-rowcount"), "601");
    await page.screenshot({ path: join(facts.shots, "runs-many.png") }); // the whole page would be 34,000 pixels high
    await page.goto(`${url}#/?sort=bogus`);
    await page.getByText("sort: one of").waitFor();
    await act("unmany");
  },
  async "a live run moves by itself, in list and page"(page, browser) {
    const list = watch(await browser.context.newPage());
    await list.goto(url);
    await list.locator(`tr[data-run="${ids.live}"]`).waitFor();
    await list.locator(".live-live").waitFor();
    await page.goto(`${url}#/run/${ids.live}`);
    await page.locator(".live-live").waitFor();
    await page.getByText("epoch 3 of 20").waitFor();
    await act("epoch", 4, 0.7654);
    await page.getByText("epoch 4 of 20").waitFor();
    await list.waitForFunction((id) => /76\.54 %/.test(document.querySelector(`tr[data-run="${id}"]`).innerText), ids.live);
    await page.getByText("left").waitFor();
    await act("create", "appears-by-itself");
    await list.getByText("appears-by-itself").waitFor();
    // Two tabs, one stream: what the server counts is what counts.
    const streams = await page.evaluate(async () => /paramsync_event_streams (\d+)/.exec(await (await fetch("metrics")).text())[1]);
    assert.equal(streams, "1");
    await act("stop");
    await page.locator(".live-lost").waitFor();
    await list.locator(".live-lost").waitFor();
    await shot(page, "run-lost-connection");
    await act("start");
    await page.locator(".live-live").waitFor({ timeout: 20000 });
    await act("epoch", 5, 0.7755);
    await page.getByText("epoch 5 of 20").waitFor();
    await act("finish");
    await list.waitForFunction((id) => /finished/.test(document.querySelector(`tr[data-run="${id}"]`).innerText), ids.live);
    // The tab that held the stream closes: the other takes over.
    await list.close();
    await act("create", "after-the-leader-left");
    await page.goto(url);
    await page.getByText("after-the-leader-left").waitFor();
    await page.locator(".live-live").waitFor();
  },
};

// axe-core's rules for WCAG 2.1 A and AA.
const axeSource = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
async function accessible(page, name) {
  await page.evaluate(axeSource);
  const { violations } = await page.evaluate(() => window.axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"] }));
  const told = violations.map((v) => `${v.id}: ${v.nodes.slice(0, 3).map((n) => `${n.html.slice(0, 160)} (${n.failureSummary})`).join("; ")}`);
  assert.deepEqual(told, [], `${name}: accessibility`);
}
async function everyPageAccessible(page) {
  for (const [name, address] of [["runs", url], ["compare", `${compareUrl}&samples=sample-1`], ["run", `${url}#/run/${ids.double}`], ["ranks", `${url}#/run/${ids.sixteen}/ranks`], ["health", `${url}#/health`]]) {
    await page.goto("about:blank");
    await page.goto(address);
    await page.locator(name === "runs" ? "tr[data-run]" : name === "health" ? ".facts" : "canvas").first().waitFor();
    await accessible(page, name);
  }
}

async function variant(name, options, work) {
  const began = Date.now();
  const browser = await open(options);
  try {
    await work(watch(browser.page));
    console.log(`ok: ${name} (${((Date.now() - began) / 1000).toFixed(1)} s)`);
  } finally {
    await browser.close();
  }
}

const noSideways = (page) => page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);

// Behind a real nginx under /deep/er/ where there is one, else behind a proxy that does the same.
async function underSubPath(work) {
  if (facts.proxied) {
    await work(facts.proxied);
    return;
  }
  const prefix = "/deep/er";
  const target = new URL(url);
  const proxy = createServer((incoming, outgoing) => {
    if (!incoming.url.startsWith(prefix + "/")) {
      outgoing.writeHead(404).end();
      return;
    }
    const onward = request({ host: target.hostname, port: target.port, method: incoming.method, path: incoming.url.slice(prefix.length), headers: incoming.headers },
      (answer) => {
        outgoing.writeHead(answer.statusCode, answer.headers);
        answer.pipe(outgoing);
      });
    onward.on("error", () => outgoing.destroy());
    outgoing.on("close", () => onward.destroy());
    incoming.pipe(onward);
  });
  await new Promise((resolve) => proxy.listen(0, "127.0.0.1", resolve));
  try {
    await work(`http://127.0.0.1:${proxy.address().port}${prefix}/`);
  } finally {
    proxy.closeAllConnections();
    proxy.close();
  }
}

try {
  const browser = await open();
  try {
    const page = watch(browser.page);
    page.setDefaultTimeout(15000);
    for (const [name, step] of Object.entries(steps)) {
      const began = Date.now();
      try {
        await step(page, browser);
      } catch (error) {
        await shot(page, "failed").catch(() => undefined);
        throw new Error(`${name}: ${error.stack}`);
      }
      assert.deepEqual(problems, [], name);
      console.log(`ok: ${name} (${((Date.now() - began) / 1000).toFixed(1)} s)`);
    }
  } finally {
    await browser.close();
  }
  await variant("dark and Chinese follow the browser", { dark: true, language: "zh-CN" }, async (page) => {
    await page.goto(compareUrl);
    await page.getByRole("heading", { name: "对比" }).waitFor();
    assert.equal(await page.evaluate(() => document.documentElement.lang), "zh-CN");
    const [red, green, blue] = await page.evaluate(() => getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number));
    assert.ok(red + green + blue < 120, "the background is dark");
    await page.locator("canvas").nth(4).waitFor();
    await shot(page, "compare-dark-zh");
    await page.goto(`${url}#/compare?runs=${ids.single},${ids.bad}`);
    await page.getByText("数据不同：摘要 other").first().waitFor(); // the server's words, too
    await page.goto(compareUrl);
    await page.getByRole("button", { name: "Switch to English" }).click();
    await page.getByRole("heading", { name: "Compare", exact: true }).waitFor();
    await page.goto(`${url}#/run/${ids.double}`);
    await page.locator("canvas").nth(4).waitFor();
    await shot(page, "run-dark");
  });
  await variant("a token is asked for and kept as a cookie", {}, async (page) => {
    await page.goto(facts.guarded);
    await page.locator("#token").fill("wrong");
    await page.keyboard.press("Enter");
    await page.getByText("That token is not right.").waitFor();
    await shot(page, "login");
    await page.locator("#token").fill(facts.token);
    await page.keyboard.press("Enter");
    await page.getByText("behind-the-token").waitFor();
    await page.locator(".live-live").waitFor();
    await page.reload();
    await page.getByText("behind-the-token").waitFor();
    assert.equal(await page.evaluate(() => document.cookie), "", "scripts cannot read it");
    // The cookie is gone in mid-session: the form comes back instead of an error.
    await page.context().clearCookies();
    await page.locator("#search").fill("behind");
    await page.locator("#token").waitFor();
  });
  await variant("works under a sub-path", {}, (page) => underSubPath(async (base) => {
    await page.goto(base);
    await page.locator("tr[data-run]").first().waitFor();
    await page.locator(".live-live").waitFor();
    await page.locator(`tr[data-run="${ids.double}"] th a`).click();
    await page.locator("canvas").nth(4).waitFor();
    const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("link", { name: /^Download/ }).first().click()]);
    assert.ok(download.url().startsWith(base), download.url());
    await page.goto(`${base}#/compare?runs=${ids.single},${ids.double}`);
    await page.locator("canvas").nth(4).waitFor();
    assert.ok(page.url().startsWith(base));
  }));
  await variant("without Web Locks, as over plain http from another host, the tabs share a stream too", {}, async (page) => {
    await page.context().addInitScript(() => Object.defineProperty(navigator, "locks", { value: undefined }));
    const streams = (tab) => tab.evaluate(async () => Number(/paramsync_event_streams (\d+)/.exec(await (await fetch("metrics")).text())[1]));
    const until = async (tab, wanted) => {
      const end = Date.now() + 30000;
      while ((await streams(tab)) !== wanted) {
        assert.ok(Date.now() < end, `${await streams(tab)} streams, not ${wanted}`);
        await tab.waitForTimeout(200);
      }
    };
    await page.goto(url);
    await page.locator(".live-live").waitFor({ timeout: 30000 });
    const second = watch(await page.context().newPage());
    await second.goto(url);
    await second.locator(".live-live").waitFor({ timeout: 30000 });
    await second.waitForTimeout(4000); // longer than the election takes
    await until(second, 1);
    await act("create", "seen-by-the-second-tab");
    await second.getByText("seen-by-the-second-tab").waitFor();
    await page.close();
    await act("create", "after-the-first-tab");
    await second.getByText("after-the-first-tab").waitFor({ timeout: 30000 });
    await until(second, 1);
  });
  await variant("axe finds nothing, light", {}, everyPageAccessible);
  await variant("axe finds nothing, dark", { dark: true }, everyPageAccessible);
  await variant("360 pixels are enough", { width: 360, height: 740, language: "zh-CN" }, async (page) => {
    for (const [name, address] of [["runs", url], ["compare", `${compareUrl}&samples=sample-1,sample-16`], ["run", `${url}#/run/${ids.double}`], ["ranks", `${url}#/run/${ids.sixteen}/ranks`], ["health", `${url}#/health`]]) {
      await page.goto(address);
      await page.locator(name === "runs" ? "tr[data-run]" : name === "health" ? ".facts" : "canvas").first().waitFor();
      await page.waitForTimeout(200);
      await shot(page, `${name}-narrow-zh`);
      assert.equal(await noSideways(page), 0, `${name} is wider than the screen`);
    }
  });
  assert.deepEqual(problems, []);
} catch (error) {
  console.log(`FAILED: ${error.stack}`);
  process.exit(1);
}
process.exit(0);
