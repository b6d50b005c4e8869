// SPDX-License-Identifier: Apache-2.0
// Bundles test/*.test.ts and runs them with node's own runner (node 18 and 20 do not read TypeScript).
import { build } from "esbuild";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = mkdtempSync(join(tmpdir(), "paramsync-web-test-"));
let status = 1;
try {
  const tests = readdirSync(join(here, "test")).filter((name) => name.endsWith(".test.ts"));
  await build({ entryPoints: tests.map((name) => join(here, "test", name)), outdir: out, outExtension: { ".js": ".mjs" },
    bundle: true, format: "esm", platform: "node", logLevel: "warning" });
  status = spawnSync(process.execPath, ["--test", ...tests.map((name) => join(out, name.replace(/\.ts$/, ".mjs")))], { stdio: "inherit" }).status ?? 1;
} finally {
  rmSync(out, { recursive: true, force: true });
}
process.exit(status);
