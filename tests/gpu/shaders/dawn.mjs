// Compiles WGSL with Dawn, which Chromium runs: standard input is JSON, {name: text}; standard output {name: messages}.
// The null backend checks what any browser would, with the limits that WebGPU guarantees, and needs no driver.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const packages = createRequire(`${resolve(process.argv[2])}/package.json`);
const { create } = await import(pathToFileURL(packages.resolve("webgpu")));
console.error = console.warn = console.log = () => {};
globalThis.gpu = create(["backend=null"]); // must outlive the device
const device = await (await gpu.requestAdapter()).requestDevice();

async function messages(code) {
  device.pushErrorScope("validation");
  const module = device.createShaderModule({ code });
  const said = (await module.getCompilationInfo()).messages.map((each) => `${each.type}: ${each.message}`);
  if (!said.length) device.createComputePipeline({ layout: "auto", compute: { module } });
  const error = await device.popErrorScope();
  return said.length || !error ? said : [`error: ${error.message}`];
}

const found = {};
for (const [name, code] of Object.entries(JSON.parse(readFileSync(0, "utf8")))) found[name] = await messages(code);
device.destroy();
process.stdout.write(JSON.stringify(found));
