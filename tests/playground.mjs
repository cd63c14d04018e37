// Uses the playground in headless Chromium, by the keyboard alone: node tests/playground.mjs SITE
// Prints one line of JSON for each check.
import { serve, startBrowser } from "../docs/browser.mjs";
const [browser, missing] = await startBrowser();
if (!browser) {
  console.log(`no browser starts here: ${missing}`);
  process.exit(0);
}
const [server, site] = await serve(process.argv[2]);
const address = site + "playground/";
const say = (check, value) => console.log(JSON.stringify({ check, value }));
const errors = [];

async function open(hash) {
  const context = await browser.newContext({ viewport: { width: 1400, height: 900 }, colorScheme: "light" });
  const page = await context.newPage();
  page.on("pageerror", error => errors.push(String(error)));
  page.on("request", request => { if (!request.url().startsWith(site)) errors.push("loads " + request.url()); });
  await page.goto(address + hash);
  await page.waitForFunction(() => document.querySelector("#status").textContent === "up to date", null, { timeout: 90000 });
  return page;
}
const text = (page, id) => page.textContent("#" + id);
async function settled(page, words) {
  await page.waitForFunction(words => document.querySelector("#status").textContent === words, words, { timeout: 90000 });
}

let page = await open("");
say("first", (await text(page, "sums")).includes("1792 B"));

// By the keyboard alone: Tab stops reach every control in order.
const names = [];
await page.focus("[name=example]");
await page.keyboard.press("Shift+Tab");
for (let at = 0; at < 14; at++) {
  await page.keyboard.press("Tab");
  names.push(await page.evaluate(() => document.activeElement.name || document.activeElement.id || document.activeElement.tagName));
}
say("tabs", names);
await page.focus("[name=budget]");
await page.keyboard.type("4500");
await page.waitForFunction(() => document.querySelector("#command").textContent.includes("--budget 4500"), null, { timeout: 90000 });
say("budget", await text(page, "sums"));
const link = await page.evaluate(() => location.hash);
say("link", link);
await page.focus("[name=source]");
await page.keyboard.press("End");
await page.keyboard.type("}");
await settled(page, "no plan");
say("problem", await text(page, "problem"));
await page.keyboard.press("Backspace");
await settled(page, "up to date");
say("mended", await page.isHidden("#problem"));
await page.context().close();

page = await open(link);
say("shared", (await page.inputValue("[name=budget]")) === "4500" && (await text(page, "command")).includes("4500"));
for (const width of [400, 1400]) for (const colorScheme of ["light", "dark"]) {
  await page.setViewportSize({ width, height: 900 });
  await page.emulateMedia({ colorScheme });
  say("overflow", await page.evaluate(() => document.documentElement.scrollWidth - innerWidth));
}
say("errors", errors);
await browser.close();
server.close();
