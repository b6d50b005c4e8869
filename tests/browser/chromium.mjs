// SPDX-License-Identifier: Apache-2.0
// Starts Debian's Chromium with a profile of its own that is removed at the end.
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

export const EXECUTABLE = process.env.PS_CHROMIUM ?? "/usr/bin/chromium";
export const available = () => existsSync(EXECUTABLE);

export async function open({ dark = false, language = "en-GB", width = 1280, height = 800 } = {}) {
  const { chromium } = await import("playwright-core");
  const profile = mkdtempSync(join(tmpdir(), "paramsync-chromium-"));
  const context = await chromium.launchPersistentContext(profile, {
    executablePath: EXECUTABLE,
    headless: true,
    args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
      "--disable-component-update", "--disable-sync", `--lang=${language}`],
    viewport: { width, height },
    locale: language,
    colorScheme: dark ? "dark" : "light",
    reducedMotion: "reduce",
  });
  return {
    context,
    page: context.pages()[0] ?? (await context.newPage()),
    async close() {
      await context.close();
      rmSync(profile, { recursive: true, force: true });
    },
  };
}
