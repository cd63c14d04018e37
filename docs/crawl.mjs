// Reads the built site as a browser shows it: node docs/crawl.mjs SITE [--pictures FOLDER] [--only PREFIX] [--lighthouse]
// Every page that is reached from the first one is laid out at 400 and 1400 px, light and dark, and read by axe-core;
// every link, picture and script is asked for. What is wrong is printed, and the exit status is 1.
import { mkdirSync, readdirSync, readFileSync } from "node:fs";
import { join, relative } from "node:path";
import { load, modules, serve, startBrowser } from "./browser.mjs";

const [site, ...options] = process.argv.slice(2);
const option = name => options.includes(name) ? options[options.indexOf(name) + 1] : null;
const pictures = option("--pictures"), only = option("--only") ?? "";
const PAGES_AT_ONCE = 3;
const PUBLISHED = /\.(html|css|js|map|json|svg|png|xml|gz|inv)$|^playground\//;
const [browser, missing] = await startBrowser(["--remote-debugging-port=9333"]);
if (!browser) {
  console.log(`no browser starts here, so nobody has read the site: ${missing}`);
  process.exit(0);
}
const [server, address] = await serve(site);
const axe = readFileSync(join(modules, "axe-core", "axe.min.js"), "utf8");
const problems = new Set();
const found = (page, words) => problems.add(`${page.replace(address, "/")}: ${words.replace(/\s+/g, " ")}`);

/** In the page: its links and ids, and entries of the reference that say nothing of what they are. */
function readPage() {
  const clean = url => url.split("#")[0];
  const words = node => node?.textContent.replace(/[\s¶]+/g, " ").trim() ?? "";
  const entries = [];
  for (const head of document.querySelectorAll("h2.doc-heading")) {
    const entry = head.parentElement, is = kind => entry.classList.contains(kind);
    if (is("doc-module")) entries.push(`${head.id} is shown as a module`);
    if (is("doc-function") && !entry.querySelector(".doc-signature")) entries.push(`${head.id} has no signature`);
    if (!words(entry.querySelector(".doc-contents"))) entries.push(`${head.id} has no docstring`);
  }
  return {
    entries,
    ids: [...document.querySelectorAll("[id], a[name]")].map(node => node.id || node.name),
    links: [...document.querySelectorAll("a[href]")].map(node => ({
      url: clean(node.href), anchor: decodeURIComponent(new URL(node.href).hash.slice(1)), text: words(node),
    })),
  };
}

/** In the page: what is wider than its place. On a wide screen all code is seen; on a narrow one it may be scrolled to. */
function findCut(wide) {
  const cut = [];
  const root = document.documentElement;
  if (root.scrollWidth > innerWidth) cut.push(`the page is ${root.scrollWidth} px wide`);
  for (const node of document.querySelectorAll("article pre, article pre > code, article td, article th, article p code, article h1, article h2, article figure")) {
    if (!node.clientWidth || node.scrollWidth <= node.clientWidth + 1 || getComputedStyle(node).display === "inline") continue;
    const scrolls = /auto|scroll/.test(getComputedStyle(node).overflowX);
    if (!scrolls || (wide && node.matches("pre > code, pre")))
      cut.push(`${node.tagName.toLowerCase()} is cut at ${node.clientWidth} of ${node.scrollWidth} px: ${node.textContent.trim().slice(0, 60)}`);
  }
  for (const node of document.querySelectorAll("article code, article img, article svg[role=img], article table")) {
    const box = node.getBoundingClientRect();
    if (box.right <= innerWidth + 1 || !box.width) continue;
    let holder = node.parentElement;
    while (holder && !/auto|scroll/.test(getComputedStyle(holder).overflowX)) holder = holder.parentElement;
    if (!holder || holder === document.body || holder === root) cut.push(`${node.tagName.toLowerCase()} leaves the page: ${node.textContent.trim().slice(0, 60)}`);
  }
  return cut;
}

const told = new Map();  // What each page has.
const queue = [address], seen = new Set(queue), asked = new Map();
async function visit(page, url) {
  const response = await page.goto(url, { waitUntil: "load" });
  if (response.status() !== 200) return found(url, `answers ${response.status()}`);
  await page.addStyleTag({ content: "* { transition: none !important }" });  // Colours change at once.
  const has = await page.evaluate(readPage);
  told.set(url, has);
  has.entries.forEach(words => found(url, words));
  for (const link of has.links) {
    if (!link.url.startsWith(address) || seen.has(link.url)) continue;
    seen.add(link.url);
    const answer = await page.request.get(link.url);
    const type = answer.headers()["content-type"] ?? "";
    asked.set(link.url, answer.status());
    if (answer.status() !== 200) found(url, `the link "${link.text}" leads to ${link.url.replace(address, "/")}, which is not there`);
    else if (!type.startsWith("text/html")) found(url, `the link "${link.text}" downloads ${link.url.replace(address, "/")}`);
    else queue.push(answer.url());
    seen.add(answer.url());
  }
  if (!url.startsWith(address + only)) return;
  for (const [width, scheme] of [[1400, "light"], [1400, "dark"], [400, "dark"], [400, "light"]]) {
    if (page.viewportSize().width !== width) await page.setViewportSize({ width, height: 900 });
    if (pictures) await page.emulateMedia({ colorScheme: scheme });
    await page.evaluate(name => { document.body.dataset.mdColorScheme = name; }, scheme === "dark" ? "slate" : "default");
    for (const words of await page.evaluate(findCut, width > 1000)) found(url, `${width} px: ${words}`);
    if (pictures) await page.screenshot({ path: join(pictures, `${url.slice(address.length).replaceAll("/", "_") || "home"}${width}-${scheme}.png`), fullPage: true });
    // Lighthouse reads the frame of the pages; here it is what they say: all rules once, and the colours once more in dark.
    const rules = { "1400 light": null, "400 dark": ["color-contrast"] }[`${width} ${scheme}`];
    if (rules === undefined) continue;
    if (rules === null) await page.evaluate(axe);
    const { violations } = await page.evaluate(
      only => axe.run("article", {
        resultTypes: ["violations"], ...(only && { runOnly: only }),
        rules: { "landmark-unique": { enabled: false } },  // The copy buttons of the theme.
      }), rules);
    for (const rule of violations) for (const node of rule.nodes)
      found(url, `${width} px, ${scheme}: ${rule.id}: ${node.html.slice(0, 120)}`);
  }
}

async function work() {
  const context = await browser.newContext();
  const page = await context.newPage();
  page.on("pageerror", error => found(page.url(), String(error)));
  page.on("response", answer => { if (answer.status() >= 400) found(page.url(), `loads ${answer.url()}, which is not there`); });
  page.on("request", request => { if (!/^(data|blob):/.test(request.url()) && !request.url().startsWith(address)) found(page.url(), `loads ${request.url()} from elsewhere`); });
  for (let idle = 0; idle < 40;) {
    const url = queue.shift();
    if (url) { await visit(page, url); idle = 0; }
    else { await new Promise(done => setTimeout(done, 50)); idle++; }
  }
  await context.close();
}
if (pictures) mkdirSync(pictures, { recursive: true });
await Promise.all(Array.from({ length: PAGES_AT_ONCE }, work));

for (const [url, has] of told) for (const { url: to, anchor } of has.links) {
  const other = told.get(to) ?? told.get(to + "/");
  if (anchor && other && !other.ids.includes(anchor)) found(url, `${to.replace(address, "/")} has no #${anchor}`);
}
for (const file of readdirSync(site, { recursive: true, withFileTypes: true }).filter(each => each.isFile())) {
  const path = relative(site, join(file.parentPath, file.name));
  if (!PUBLISHED.test(path)) found("/" + path, "is published, and is no page");
  if (path.endsWith("index.html") && !told.has(address + path.slice(0, -"index.html".length))) found("/" + path, "is reached by no link");
}
if (options.includes("--lighthouse")) {
  const lighthouse = (await load("lighthouse/core/index.js")).default;
  const kinds = new Map([...told.keys()].map(url => [url.slice(address.length).split("/").slice(0, -2).join("/") || url, url]));
  for (const url of kinds.values()) {
    const { lhr } = await lighthouse(url, { port: 9333, onlyCategories: ["accessibility"], logLevel: "silent" });
    const score = Math.round(100 * lhr.categories.accessibility.score);
    if (score < 100) found(url, `Lighthouse: accessibility ${score}`);
    console.log(`${score} ${url.replace(address, "/")}`);
  }
}
await browser.close();
server.close();
for (const words of [...problems].sort()) console.log(words);
console.log(`${told.size} pages, ${seen.size} addresses, ${problems.size} problems`);
process.exit(problems.size ? 1 : 0);
