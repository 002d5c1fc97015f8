// ONNX Runtime in WebAssembly, by the npm package onnxruntime-web, in a worker of its own.

/** settings: model (address of a folder that `edge convert --to onnx` wrote), threads, layers, kvHeads, head, base. */
export async function open(settings) {
  const worker = new Worker(new URL("onnx_worker.js", import.meta.url), { type: "module" });
  let onPiece = () => {};
  let done, failed;
  worker.onmessage = ({ data }) => ("piece" in data ? onPiece() : "error" in data ? failed(new Error(data.error)) : done(data));
  worker.onerror = (event) => failed(new Error(event.message));
  const ask = (message) => new Promise((resolve, reject) => {
    [done, failed] = [resolve, reject];
    worker.postMessage(message);
  });
  const { version } = await ask({ open: { ...settings, model: new URL(settings.model, location.href).href } });
  return {
    version,
    run({ ids }, tokens, piece) {
      onPiece = piece;
      return ask({ run: ids, tokens });
    },
    close: async () => worker.terminate(),
  };
}
