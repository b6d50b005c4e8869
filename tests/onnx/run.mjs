// SPDX-License-Identifier: Apache-2.0
// run.mjs MODEL.onnx IMAGES.f32 BATCH SIDE: the logits of IMAGES [BATCH, 3, SIDE, SIDE] as JSON, by ONNX Runtime's WebAssembly.
import { readFileSync } from "node:fs";
import ort from "onnxruntime-web";

const [model, images, batch, side] = process.argv.slice(2);
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";
const session = await ort.InferenceSession.create(readFileSync(model), { executionProviders: ["wasm"] });
const bytes = readFileSync(images);
const data = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
const input = new ort.Tensor("float32", data, [Number(batch), 3, Number(side), Number(side)]);
const { logits } = await session.run({ images: input });
console.log(JSON.stringify({ inputs: session.inputNames, outputs: session.outputNames, dims: logits.dims, logits: [...logits.data] }));
process.exit(0);
