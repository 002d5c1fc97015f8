/**
 * Checks the hashes of scripts before they run, since a truncated or foreign file may run, too. Until this script runs, the
 * page says that it did not start. index.html is not checked, because some hosts change it.
 */
const status = /** @type {any} */ (document.getElementById("status"));
status.textContent = "Starting";

/** @param {string} name @param {RequestCache} cache */
async function read(name, cache) {
  const response = await fetch(name, { cache }).catch(() => null);
  if (!response?.ok) throw new Error(`${name} cannot be fetched: ${response ? `the server says ${response.status}` : "check the connection"}`);
  return response.arrayBuffer();
}

/** @param {string} name @param {{sha256: string}} file @param {RequestCache} cache */
async function isWhole(name, { sha256 }, cache) {
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", await read(name, cache)));
  return Array.from(hash, (each) => each.toString(16).padStart(2, "0")).join("") === sha256;
}

/** @param {[string, any]} entry */
async function check([name, file]) {
  if (!(await isWhole(name, file, "default")) && !(await isWhole(name, file, "reload"))) throw new Error(`${name} is damaged: upload the site again`);
}

try {
  let files;
  try {
    files = Object.entries(JSON.parse(new TextDecoder().decode(await read("manifest.json", "no-cache"))).files);
  } catch (error) {
    throw /^manifest/.test(/** @type {any} */ (error).message) ? error : new Error("manifest.json is damaged: upload the site again");
  }
  if (globalThis.crypto?.subtle) await Promise.all(files.filter(([name]) => /\.(js|css)$/.test(name)).map(check));
  await import("./page.js");
} catch (error) {
  status.className = "bad";
  status.textContent = /** @type {any} */ (error).message;
}
