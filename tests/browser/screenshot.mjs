// SPDX-License-Identifier: Apache-2.0
// node screenshot.mjs URL OUT.png [--dark] [--lang zh] [--width N] [--height N] [--full]
import { available, EXECUTABLE, open } from "./chromium.mjs";

const [url, out, ...flags] = process.argv.slice(2);
const value = (name, fallback) => {
  const at = flags.indexOf(name);
  return at >= 0 && flags[at + 1] !== undefined ? flags[at + 1] : fallback;
};
if (!url || !out) {
  console.error("usage: node screenshot.mjs URL OUT.png [--dark] [--lang zh] [--width N] [--height N] [--full]");
  process.exit(2);
}
if (!available()) {
  console.error(`screenshot: ${EXECUTABLE} is not there (apt-get install chromium, or set PS_CHROMIUM)`);
  process.exit(1);
}
const language = value("--lang", "en") === "zh" ? "zh-CN" : "en-GB";
const browser = await open({ dark: flags.includes("--dark"), language, width: Number(value("--width", "1280")), height: Number(value("--height", "800")) });
try {
  const { page } = browser;
  page.on("console", (message) => message.type() === "error" && console.error(`page: ${message.text()}`));
  page.on("pageerror", (error) => console.error(`page: ${error.message}`));
  await page.goto(url);
  await page.locator("main .page :is(table, canvas, .facts), main .state strong").first().waitFor({ timeout: 15000 });
  await page.locator(".live-live").waitFor({ timeout: 15000 });
  await page.waitForTimeout(300); // charts draw in the next frames
  await page.screenshot({ path: out, fullPage: flags.includes("--full") });
} finally {
  await browser.close();
}
