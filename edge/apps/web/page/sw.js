/**
 * Serves the page offline, and with the headers that threads need, in case the server does not set them.
 *
 * Files come from the network if possible, otherwise from the last visit. The package itself stores the model.
 */
const CACHE = "edge";
const HEADERS = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Cross-Origin-Resource-Policy": "same-origin",
};

addEventListener("install", (event) => event.waitUntil(keepAll().then(() => skipWaiting())));
addEventListener("activate", (event) => event.waitUntil(clients.claim()));
addEventListener("fetch", (event) => {
  const { request } = event;
  const ours = new URL(request.url).origin === location.origin;
  if (ours && request.method === "GET" && !request.headers.has("Range")) event.respondWith(answer(request));
});

/** All files of the site but the model and the modules, of which the browser needs one. */
async function keepAll() {
  const manifest = await (await fetch("manifest.json", { cache: "no-cache" })).json();
  const names = Object.keys(manifest.files).filter((name) => /\.(html|js|css|svg|webmanifest)$/.test(name));
  await (await caches.open(CACHE)).addAll(["./", "manifest.json", ...names]);
}

async function answer(request) {
  const cache = await caches.open(CACHE);
  let response;
  try {
    response = await fetch(request);
    if (response.ok && response.status === 200) await cache.put(request, response.clone());
  } catch (error) {
    response = await cache.match(request, { ignoreSearch: true });
    if (!response) throw error;
  }
  if (!response.status) return response; // such as a redirect, whose headers cannot be changed
  const headers = new Headers(response.headers);
  for (const [name, value] of Object.entries(HEADERS)) headers.set(name, value);
  return new Response(response.body, { status: response.status, statusText: response.statusText, headers });
}
