// What drives a browser over the built site: a server of its folder, and a Chromium of this machine or of npm.
// A folder of node modules (RESHARD_NODE_MODULES, else that of `make docs`) has playwright-core and @sparticuz/chromium.
import { execFileSync } from "node:child_process";
import { existsSync, readFileSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const root = resolve(import.meta.dirname, "..");
export const modules = process.env.RESHARD_NODE_MODULES ?? join(root, ".venv", "node", "node_modules");
export const load = path => import(pathToFileURL(join(modules, path)));

/** The path of a Chromium: that of the machine first, since it is kept up to date. */
async function findChromium() {
  for (const name of ["chromium", "chromium-browser", "google-chrome"]) {
    try { return execFileSync("which", [name], { encoding: "utf8" }).trim(); } catch { /* the next one */ }
  }
  return (await load("@sparticuz/chromium/build/esm/index.js")).default.executablePath();
}

/** A running browser, or what is missing for one. */
export async function startBrowser(args = []) {
  try {
    const { chromium } = await load("playwright-core/index.mjs");
    return [await chromium.launch({ executablePath: await findChromium(), args: ["--no-sandbox", ...args] }), ""];
  } catch (error) {
    return [null, String(error).split("\n")[0]];
  }
}

const TYPES = {
  ".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript",
  ".json": "application/json", ".svg": "image/svg+xml", ".png": "image/png", ".wasm": "application/wasm",
};

/** Serves a folder as a host of static pages does; gives the server, and its address with a slash at the end. */
export async function serve(folder) {
  const server = createServer((request, response) => {
    const path = decodeURIComponent(new URL(request.url, "http://site").pathname);
    let file = join(folder, path);
    if (existsSync(file) && statSync(file).isDirectory()) {
      if (!path.endsWith("/")) return response.writeHead(301, { location: path + "/" }).end();
      file = join(file, "index.html");
    }
    const there = existsSync(file);
    if (!there) file = join(folder, "404.html");
    const type = TYPES[extname(file)] ?? "application/octet-stream";
    response.writeHead(there ? 200 : 404, { "content-type": type }).end(existsSync(file) ? readFileSync(file) : "");
  });
  await new Promise(done => server.listen(0, "127.0.0.1", done));
  return [server, `http://127.0.0.1:${server.address().port}/`];
}
