// Greedy generation with a graph of edge's ONNX engine: KV rows are inputs and outputs, in float32.
import * as ort from "/npm/onnxruntime-web/dist/ort.wasm.min.mjs";

let session, model;

async function open(settings) {
  model = settings;
  ort.env.wasm.numThreads = model.threads;
  ort.env.wasm.wasmPaths = "/npm/onnxruntime-web/dist/";
  const data = new Uint8Array(await (await fetch(`${model.model}/model.onnx.data`)).arrayBuffer());
  session = await ort.InferenceSession.create(`${model.model}/model.onnx`, {
    executionProviders: ["wasm"], graphOptimizationLevel: "all", enableMemPattern: false,
    externalData: [{ path: "model.onnx.data", data }],
  });
  return { version: ort.env.versions.web };
}

/** Cosines and sines of the positions first … first + count - 1. */
function angles(first, count) {
  const half = model.head / 2;
  const cos = new Float32Array(count * half), sin = new Float32Array(count * half);
  for (let row = 0; row < count; row++)
    for (let pair = 0; pair < half; pair++) {
      const angle = (first + row) * model.base ** (-pair / half);
      cos[row * half + pair] = Math.cos(angle);
      sin[row * half + pair] = Math.sin(angle);
    }
  const dims = [count, half];
  return { cos: new ort.Tensor("float32", cos, dims), sin: new ort.Tensor("float32", sin, dims) };
}

async function run(prompt, tokens) {
  const ints = (values, dims) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), dims);
  let past = {}, rows = 0, ids = prompt;
  for (let layer = 0; layer < model.layers; layer++)
    for (const kind of ["key", "value"])
      past[`past_${kind}.${layer}`] = new ort.Tensor("float32", new Float32Array(0), [1, model.kvHeads, 0, model.head]);
  const answer = [];
  while (answer.length < tokens) {
    const count = ids.length;
    rows += count;
    const found = await session.run({
      tokens: ints(ids, [1, count]),
      positions: ints([...ids.keys()].map((each) => each + rows - count), [1, count]),
      wanted: ints([count - 1], [1]),
      last: new ort.Tensor("int32", Int32Array.of(rows - 1), [1]),
      rows: new ort.Tensor("int32", Int32Array.of(rows), []),
      ...angles(0, rows), // ONNX Runtime requires an angle for each row
      ...past,
    });
    const logits = found.logits.data;
    let best = 0;
    for (let id = 1; id < logits.length; id++) if (logits[id] > logits[best]) best = id;
    past = {};
    for (const name in found) if (name !== "logits") past[`past_${name}`] = found[name];
    answer.push(best);
    ids = [best];
    postMessage({ piece: best });
  }
  return { ids: answer, tokens };
}

onmessage = async ({ data }) => {
  try {
    postMessage(data.open ? await open(data.open) : await run(data.run, data.tokens));
  } catch (error) {
    postMessage({ error: String(error?.message ?? error) });
  }
};
