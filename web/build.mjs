// SPDX-License-Identifier: Apache-2.0
// Bundles src/ into OUT (default: dist/): index.html, app.js, app.css, favicon.svg, each with a .gz beside it.
import { build } from "esbuild";
import { gzipSync } from "node:zlib";
import { copyFileSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "dist");
const limitBytes = 150 * 1024;

mkdirSync(out, { recursive: true });
await build({
  entryPoints: [join(here, "src/app.ts"), join(here, "src/app.css")],
  outdir: out,
  bundle: true,
  minify: true,
  format: "iife",
  target: ["es2020", "chrome90", "firefox90", "safari15"],
  legalComments: "eof",
  logLevel: "warning",
});
for (const name of ["index.html", "favicon.svg"]) copyFileSync(join(here, "src", name), join(out, name));

let total = 0;
for (const name of ["index.html", "app.js", "app.css", "favicon.svg"]) {
  const packed = gzipSync(readFileSync(join(out, name)), { level: 9 });
  total += packed.length;
  writeFileSync(join(out, name + ".gz"), packed);
}
if (total > limitBytes) {
  console.error(`dashboard: ${total} bytes gzip-ed, more than ${limitBytes}`);
  process.exit(1);
}
console.log(`dashboard: ${(total / 1024).toFixed(1)} KiB gzip-ed in ${out}`);
