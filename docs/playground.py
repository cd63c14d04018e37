"""The playground: a page of the site that plans in the browser, by Pyodide and this package.

`write_files` has the page with its worker, script and style; `add_python` puts beside them the package as an archive,
and the files of Pyodide. Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from html import escape
from pathlib import Path

from reshard.draw.plan_page import STYLE as PICTURES
from reshard.show.html import DARK, LIGHT, SHEET
from reshard.synth.network import PRESETS

ROOT = Path(__file__).resolve().parent.parent
PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
EXAMPLES = {
    "one all-to-all": {"mesh": "x=4,y=2", "source": "f32[{y}8, 16, {x}4]", "target": "f32[16, {x}{y}2, 16]"},
    "the same in less memory": {
        "mesh": "x=4,y=2", "source": "f32[{y}8, 16, {x}4]", "target": "f32[16, {x}{y}2, 16]", "budget": "4500",
    },
    "a sum, and columns to rows": {"mesh": "x=4,y=2", "source": "f32[64, {y}32] + sum{x}", "target": "f32[{x}16, 64]"},
    "JAX's notation, on 64 TPUs": {
        "mesh": "x=8,y=8", "source": "P('x', 'y')", "target": "P('y', 'x')", "shape": "4096, 4096", "dtype": "bf16",
        "network": "tpu-v5p",
    },
    "block-cyclic, another grid": {"mesh": "p=2,q=2", "source": "f64[2{p}8, 2{q}8]", "target": "f64[4{q}4, 4{p}4]"},
    "from a trainer to a server": {
        "mesh": "fsdp=4", "target_mesh": "tp=2@4", "source": "bf16[{fsdp}16, 64]", "target": "bf16[64, {tp}32]",
    },
    "sizes that do not divide": {"mesh": "x=4", "source": "f32[{x}3/10, 7]", "target": "f32[10, {x}2/7]"},
}  # fmt: skip

WORKER = """\
import { loadPyodide } from "./pyodide/pyodide.mjs";
const here = name => new URL(name, import.meta.url).href;
const ready = (async () => {
  const python = await loadPyodide({ indexURL: here("pyodide/") });
  const archive = await fetch(here("reshard.zip"));
  if (!archive.ok) throw new Error("reshard.zip is not there");
  python.unpackArchive(await archive.arrayBuffer(), "zip");
  python.runPython("import json\\nfrom reshard.cli.playground import answer_fields\\n" +
    "ask = lambda text: json.dumps(answer_fields(json.loads(text)))");
  return python.globals.get("ask");
})();
ready.then(() => postMessage({ ready: true }), error => postMessage({ failed: String(error) }));
onmessage = async ({ data }) => {
  try {
    const ask = await ready;
    postMessage({ result: JSON.parse(ask(JSON.stringify(data))) });
  } catch (error) {
    postMessage({ result: { error: "a fault of the playground: " + String(error).trim().split("\\n").pop() } });
  }
};
"""

SCRIPT = """\
const EXAMPLES = %s, PATIENCE = 20000;
const form = document.querySelector("#planner form"), status = document.querySelector("#status");
const output = document.querySelector("#output"), problem = document.querySelector("#problem");
let worker, busy = false, next = null, clock;

function state() {
  const fields = {};
  for (const [name, value] of new FormData(form)) if (value.trim() && name !== "example") fields[name] = value.trim();
  return fields;
}
function fill(fields) {
  for (const element of form.elements) {
    if (!element.name || element.name === "example") continue;
    if (element.type === "checkbox") element.checked = Boolean(fields[element.name]);
    else element.value = fields[element.name] ?? "";
  }
}
function start() {
  worker = new Worker(new URL("worker.js", location.href), { type: "module" });
  worker.onerror = () => say("Python could not be loaded: this folder needs an HTTP server and the files of Pyodide.");
  worker.onmessage = ({ data }) => {
    if (data.failed) return say("Python could not be loaded: " + data.failed);
    if (data.ready) { document.body.dataset.ready = "yes"; return; }
    clearTimeout(clock);
    busy = false;
    show(data.result);
    if (next) ask(next);
  };
}
function say(words) { status.textContent = words; }
function ask(fields) {
  if (busy) { next = fields; return; }
  next = null;
  busy = true;
  say(document.body.dataset.ready ? "planning" : "loading Python, once: about 13 MB");
  if (document.body.dataset.ready) clock = setTimeout(giveUp, PATIENCE);
  worker.postMessage(fields);
}
function giveUp() {
  worker.terminate();
  delete document.body.dataset.ready;
  busy = false;
  start();
  show({ error: "planning this takes longer than 20 s here; the reshard command has no such limit" });
}
function show(result) {
  const wrong = "error" in result;
  problem.hidden = !wrong;
  problem.textContent = wrong ? result.error : "";
  output.classList.toggle("stale", wrong);
  say(wrong ? "no plan" : "up to date");
  if (wrong) return;
  output.hidden = false;
  for (const name of ["sums", "tiles", "traffic", "memory", "steps"])
    output.querySelector("#" + name).innerHTML = result[name];
  for (const name of ["size", "command"]) output.querySelector("#" + name).textContent = result[name];
}
let waiting;
function changed() {
  const fields = state();
  history.replaceState(null, "", "#" + new URLSearchParams(fields));
  clearTimeout(waiting);
  waiting = setTimeout(() => ask(fields), 150);
}
function read() {
  const fields = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  fill(Object.keys(fields).length ? fields : Object.values(EXAMPLES)[0]);
  ask(state());
}
form.addEventListener("input", event => {
  if (event.target.name === "example") fill(EXAMPLES[event.target.value] ?? {});
  else form.elements.example.value = "";
  changed();
});
form.addEventListener("submit", event => { event.preventDefault(); changed(); });
document.querySelector("#copy").addEventListener("click", async event => {
  changed();
  try { await navigator.clipboard.writeText(location.href); say("the link is copied"); }
  catch { say("the link is in the address bar"); }
});
window.addEventListener("hashchange", read);
start();
read();
"""

STYLE = """
font-size: 15px; line-height: 1.5;
form { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 260px), 1fr)); gap: 12px 16px;
  background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px; }
label { display: block; font-size: 13px; color: var(--faint); }
@media (min-width: 1180px) { form { grid-template-columns: repeat(4, 1fr); } .wide { grid-column: span 2; } }
input:not([type=checkbox]), select { display: block; width: 100%; margin-top: 3px; padding: 7px 9px;
  border: 1px solid var(--faint); border-radius: 6px; background: var(--back); color: var(--text);
  font: 14px/1.3 ui-monospace, SFMono-Regular, Menlo, monospace; }
.row { display: flex; gap: 16px; align-items: end; flex-wrap: wrap; }
button[type] { padding: 7px 14px; border: 1px solid var(--faint); border-radius: 6px; background: var(--track);
  color: var(--text); font: inherit; cursor: pointer; }
.check { display: flex; gap: 8px; align-items: center; min-height: 36px; color: var(--text); }
#status { min-height: 1.5em; margin: 12px 0 6px; } h2 { font-size: 16px; margin: 28px 0 10px; }
figure { width: auto; max-width: none; text-align: center; } figcaption { font-style: normal; max-width: none; }
.sum b { font-size: 20px; } .faint, figcaption, table, .sum span { font-size: 13px; }
table { display: table; background: none; border: 0; } th { min-width: 0; background: none; }
@media (min-width: 1180px) {
  .pictures { display: grid; grid-template-columns: minmax(0, 4fr) minmax(0, 3fr); gap: 0 16px; }
  .pictures > div { display: flex; flex-direction: column; } .pictures figure { flex: 1; } }
#problem { border-left: 4px solid var(--bad); background: var(--card); padding: 11px 16px; margin: 0 0 16px;
  border-radius: 0 8px 8px 0; overflow-wrap: anywhere; }
.stale { opacity: .45; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 11px 16px; margin: 0; }
pre > code { border: 0; padding: 0; font-size: 13px; white-space: pre-wrap; }
"""


def _field(name: str, words: str, more: str = "", wide: bool = False) -> str:
    style = ' class="wide"' if wide else ""
    return (
        f'<label{style}>{words}<input name="{name}" autocomplete="off" autocapitalize="off" spellcheck="false"{more}>'
        "</label>"
    )


def write_files() -> dict[str, str]:
    """The page, and what it loads but Python, by their paths on the site; and the palette of all pages."""
    options = "".join(f"<option>{escape(name)}</option>" for name in EXAMPLES)
    networks = "".join(f"<option>{escape(name)}</option>" for name in PRESETS)
    page = f"""---
title: Playground
hide: [navigation, toc]
---

# Playground

The cheapest move of an array from one sharded layout to another, planned in this browser as you type. Nothing leaves
it. [The cheat sheet](reference/cheat-sheet.md) has the notation, [the glossary](reference/glossary.md) the words.

<link rel="stylesheet" href="playground.css">
<div id="planner">
<form aria-label="what to plan">
<label class="wide">an example<select name="example"><option value="">-</option>{options}</select></label>
{_field("mesh", "mesh: axes and their sizes", ' placeholder="x=4,y=2"', wide=True)}
{_field("source", "source: the layout now", ' placeholder="f32[{y}8, 16, {x}4]"', wide=True)}
{_field("target", "target: the layout wanted", ' placeholder="f32[16, {x}{y}2, 16]"', wide=True)}
{_field("budget", "budget: most bytes live on a device", ' placeholder="none; 64MiB, 4500"')}
<label>network: plan for least time<select name="network"><option value="">none: fewest bytes</option>{networks}
</select></label>
{_field("target_mesh", "the target's mesh, if it is another", ' placeholder="tp=4@8"')}
{_field("shape", "shape, where the layouts do not say it", ' placeholder="4096, 4096"')}
{_field("dtype", "dtype, where the layouts do not say it", ' placeholder="bf16"')}
<div class="row"><label class="check"><input type="checkbox" name="donate" value="yes">donate the source</label>
<button type="button" id="copy">Copy link</button></div>
</form>
<p id="status" class="faint" role="status"></p>
<p id="problem" role="alert" hidden></p>
<div id="output" hidden>
<p id="size" class="faint"></p>
<div id="sums"></div>
<div class="pictures">
<div><h2>Who holds what</h2><figure id="tiles"></figure></div>
<div><h2>Who sends how much to whom</h2><figure id="traffic"></figure></div>
</div>
<h2>Live bytes on a device</h2><figure id="memory"></figure>
<h2>Steps</h2><div id="steps"></div>
<h2>In a shell</h2><pre><code id="command"></code></pre>
</div>
<noscript><p>The playground needs JavaScript: it runs Python in the browser.</p></noscript>
</div>
<script type="module" src="playground.js"></script>
"""
    examples = json.dumps(EXAMPLES)
    return {
        "playground.md": page,
        "playground/playground.js": SCRIPT % examples,
        "playground/playground.css": f"#planner {{ {SHEET} {PICTURES} {STYLE} }}\n",
        "playground/worker.js": WORKER,
        "palette.css": f"[data-md-color-scheme=default] {{ {LIGHT} }}\n[data-md-color-scheme=slate] {{ {DARK} }}\n",
    }


def add_python(folder: Path, pyodide: Path) -> None:
    """Adds what the page's worker loads to its folder."""
    (folder / "pyodide").mkdir(parents=True, exist_ok=True)
    for name in PYODIDE:
        shutil.copy(pyodide / name, folder / "pyodide" / name)
    with zipfile.ZipFile(folder / "reshard.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((ROOT / "reshard").rglob("*.py")):
            archive.write(path, path.relative_to(ROOT))
