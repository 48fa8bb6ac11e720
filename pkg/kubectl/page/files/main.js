// The page follows the events of the server, and draws what they say. Where the user
// has zoomed to, and what is selected, is in the address after the #.

import {h, number, plural, replace} from "./dom.js";
import {filter, finish, gpusOf, model, pools, putNodes, putOutline, removeNodes, reset, totals} from "./model.js";
import {glyph, gpuCard, nodeCard, row, tile, useCard} from "./draw.js";
import {drawAttention, drawInspector, drawLegend, drawPolicies, drawTotals, keepFocus} from "./panels.js";

const el = (id) => document.getElementById(id);

// rowsUpTo is how many GPUs are drawn as bars: in the whole cluster, and in a pool.
const rowsUpTo = {cluster: 96, pool: 256};

// place is what is shown: {pool, node, gpu, use, q}, each absent or a string.
const place = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

function go(changes, push = true) {
  const next = new URLSearchParams(Object.entries({...place(), ...changes}).filter(([, v]) => v));
  history[push ? "pushState" : "replaceState"](null, "", `#${next}`);
  schedule();
}

const select = (gpu, use) => {
  const same = place().gpu === gpu && place().use === use;
  go({gpu: same ? "" : gpu, use: same ? "" : use});
};
const search = (q) => {
  el("query").value = q.trim().replace(/\s+/g, " ");
  go({q: el("query").value}, false);
};
const openNode = (node) => go({node, gpu: "", use: ""});
const openPool = (pool) => go({pool, node: "", gpu: "", use: ""});

// drawn are the elements of nodes, by name, with what they were drawn from.
const drawn = new Map();

function nodeElement(node, form, means, selected) {
  const signature = `${form} ${place().node ?? ""} ${place().q ?? ""} ${node.gpus.some((g) => g.key === selected) ? selected : ""}`;
  const old = drawn.get(node.name);
  if (old?.node === node && old.signature === signature) return old.element;
  const element = form === "tiles" ? tile(node, means, openNode) : nodeCardOf(node, means, selected);
  drawn.set(node.name, {node, signature, element});
  return element;
}

function nodeCardOf(node, means, selected) {
  const gpus = means ? node.gpus.filter(means) : node.gpus;
  const models = [...new Set(node.gpus.map((g) => g.model || "unknown model"))];
  return h("section.node", {"data-node": node.name, "aria-label": node.name},
    h("h3", null, place().node ? node.name : h("button.link", {type: "button", "data-key": `node ${node.name}`, onclick: () => openNode(node.name)}, node.name),
      h("span", null, models.map((m) => `${node.gpus.filter((g) => (g.model || "unknown model") === m).length}× ${m}`).join(", ")),
      node.driverVersion ? h("span", null, `driver ${node.driverVersion}`) : null,
      node.rank ? h("span", null, node.rank) : null,
      gpus.length < node.gpus.length ? h("span", null, `${gpus.length} of ${node.gpus.length} shown`) : null),
    (node.problems ?? []).map((p) => h("p.bad", null, `! ${p}`)),
    h("ul.gpus", null, gpus.map((g) => row(g, g.key === selected, select))));
}

// drawMap draws the nodes in view: as bars where these are few, as cells otherwise.
function drawMap(at, nodes, means) {
  const shown = means ? nodes.filter((n) => n.gpus.some(means)) : nodes;
  const count = means ? gpusOf(shown).filter(means).length : gpusOf(shown).length;
  const form = count <= (at.pool || at.node ? rowsUpTo.pool : rowsUpTo.cluster) ? "rows" : "tiles";
  const inView = form === "rows" ? shown : nodes;
  const map = el("map");
  const byKeys = document.activeElement.matches("#map :focus-visible");
  keepFocus(() => replace(map, [
    crumbs(at, count, means), ...pools(inView).map((p) => poolElement(p, form, means, at, gpusOf(inView).length)), inView.length ? null : nothing(at),
  ]));
  map.dataset.form = form;
  map.dataset.gpus = count;
  if (!map.querySelector('[data-nav][tabindex="0"]')) map.querySelector("[data-nav]")?.setAttribute("tabindex", "0");
  if (byKeys && !map.contains(document.activeElement)) resume(map);
  shownLast = at;
}

let shownLast = {}; // the place that was drawn last
let inspected = ""; // the GPU whose details were drawn last

// resume gives the focus, whose element has gone, to what opened the place that was left, or
// else to the first GPU: arrow keys go on from there. Who uses a mouse or a finger isn't moved.
function resume(map) {
  const opened = [`node ${shownLast.node}`, shownLast.node ?? "", `pool ${shownLast.pool}`];
  const to = opened.map((key) => map.querySelector(`[data-key="${CSS.escape(key)}"]`)).find(Boolean);
  focusOn(to ?? map.querySelector("[data-nav]") ?? map);
}

// leaveDetails moves the focus from closed details to their GPU.
function leaveDetails(gpu) {
  const map = el("map");
  focusOn(map.querySelector(`[data-key="${CSS.escape(gpu)}"]`) ?? map.querySelector("[data-nav]") ?? map);
}

const sections = new Map(); // of pools, by name

function poolElement(pool, form, means, at, gpus) {
  const section = sections.get(pool.name) ?? h("section.pool", {"data-pool": pool.name}, h("div.poolhead"), h("div.nodes"));
  sections.set(pool.name, section);
  const t = totals(gpusOf(pool.nodes));
  const [head, body] = section.children; // they stay, so that what has the focus does
  body.className = `nodes ${form}${form === "tiles" && gpus <= 768 ? " large" : ""}`;
  replace(body, pool.nodes.map((n) => nodeElement(n, form, means, at.gpu)));
  replace(head, [
    h("h2", null, at.pool ? pool.name : h("button.link", {type: "button", "data-key": `pool ${pool.name}`, onclick: () => openPool(pool.name)}, pool.name)),
    h("span", null, `${plural(t.gpus, "GPU")} on ${plural(pool.nodes.length, "node")}`),
    h("ul.mini", null, Object.entries(t.states).filter(([, n]) => n).map(([k, n]) => h("li", {"data-state": k, title: k}, glyph(k), number(n)))),
    form === "tiles" && t.fits.length ? h("ul.chips", null, t.fits.slice(0, 4).map((f) => h("li", null, h("b", null, number(f.count)), `× ${f.name}`))) : null,
  ]);
  return section;
}

function crumbs(at, count, means) {
  const steps = [];
  if (at.pool || at.node) steps.push(h("button.link", {type: "button", "data-key": "up", onclick: () => go({pool: "", node: ""})}, "Cluster"));
  const pool = at.pool ?? model.nodes.get(at.node)?.pool;
  if (pool && at.node) steps.push(h("button.link", {type: "button", "data-key": "up pool", onclick: () => openPool(pool)}, pool));
  const here = at.node ?? at.pool;
  if (here) steps.push(h("b", {"aria-current": "page"}, here));
  if (!steps.length && !means) return null;
  return h("nav.crumbs", {"aria-label": "Where"}, h("ol", null, steps.map((step) => h("li", null, step))),
    means ? h("span.match", null, `${plural(count, "GPU")} ${count === 1 ? "matches" : "match"} “${at.q}”`, h("button.quiet", {type: "button", "data-key": "clear", onclick: () => search("")}, "Clear")) : null);
}

// nothing says why the map is empty, and what to do.
function nothing(at) {
  const reading = model.cluster?.reading;
  if (!model.cluster || reading?.length || !model.complete) {
    return h("div.empty", null, h("h2", null, "Reading the cluster …"), reading?.length ? h("p", null, `Still to come: ${reading.join(", ")}.`) : null);
  }
  if (at.q) return h("div.empty", null, h("h2", null, `No GPU matches “${at.q}”.`), h("p", null, h("button.quiet", {type: "button", onclick: () => search("")}, "Clear the search")));
  if (at.node || at.pool) {
    return h("div.empty", null, h("h2", null, `There is no ${at.node ? `node ${at.node}` : `pool ${at.pool}`} with GPUs any more.`),
      h("p", null, h("button.quiet", {type: "button", onclick: () => go({pool: "", node: ""})}, "Show the cluster")));
  }
  return h("div.empty", null, h("h2", null, "No GPUs can be seen."),
    h("p", null, "Tessera publishes a node's GPUs once its plugin has found them and NVIDIA's driver. These say how far that went:"),
    h("pre", null, "kubectl get gpuinventories\nkubectl get resourceslices\nkubectl get pods -A -l app.kubernetes.io/name=tessera"),
    h("p", null, "Where rights are missing, a note above says which."));
}

function draw() {
  const at = place();
  if (el("query") !== document.activeElement) el("query").value = at.q ?? "";
  const means = filter(at.q ?? "");
  const known = model.complete || (model.outline && !["node", "pool", "gpu", "q"].some((k) => at[k]));
  const everything = known ? [...model.nodes.values()] : [];
  const nodes = everything.filter((n) => (at.node ? n.name === at.node : !at.pool || n.pool === at.pool));
  drawNotes();
  if (everything.length) keepFocus(() => drawTotals(gpusOf(nodes), nodes, at.q ?? "", search));
  else el("totals").replaceChildren();
  drawMap(at, nodes, means);
  const gpu = at.gpu ? gpusOf(everything).find((g) => g.key === at.gpu) : null;
  const inDetails = document.activeElement.matches("#inspector :focus-visible");
  drawInspector(gpu, at.use, () => go({gpu: "", use: ""}));
  if (inDetails && !gpu) leaveDetails(inspected);
  // Once for each GPU, when its node is there.
  if (gpu && inspected !== at.gpu) {
    tip(null);
    el("map").querySelector('[aria-pressed="true"]')?.scrollIntoView({block: "nearest"});
  }
  inspected = gpu ? at.gpu : "";
  if (model.cluster && known) {
    drawAttention(model.cluster, everything, gpusOf(everything).length <= 256, (key) => select(key), search);
    drawPolicies(model.cluster.policies, search);
    el("cluster").textContent = model.cluster.name;
    document.title = model.cluster.name ? `GPU map – ${model.cluster.name}` : "GPU map";
  }
  el("said").textContent = means ? `${el("map").dataset.gpus} GPUs match` : "";
}

function drawNotes() {
  const notes = (model.cluster?.notes ?? []).map((n) => h("p.note", {"data-resource": n.resource, "data-verb": n.verb}, n.text));
  if (lost) notes.unshift(h("p.note.lost", null, `kubectl gpu web hasn't answered since ${lost.toLocaleTimeString()}; the page shows the state of that time. If the command has ended, start it again and open the address that it prints.`));
  el("notes").replaceChildren(...notes);
}

let scheduled = false;
function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    draw();
  });
}

// lost is when the server was lost; null while it answers.
let lost = null;

function setLive(state, text) {
  const live = el("live");
  if (live.dataset.live === state) return;
  live.dataset.live = state;
  live.querySelector("b").textContent = text;
}

function listen() {
  const events = new EventSource("events");
  const on = (name, f) => events.addEventListener(name, (e) => {
    f(JSON.parse(e.data));
    if (model.complete) schedule();
  });
  events.onopen = () => {
    lost = null;
    reset();
  };
  on("cluster", (c) => {
    model.cluster = c;
    schedule();
    if (!c.reading?.length) {
      const polled = c.notes?.some((n) => n.verb === "watch");
      setLive(polled ? "polling" : "live", polled ? "Read each minute" : "Live");
    }
  });
  on("nodes", putNodes);
  on("gone", removeNodes);
  on("all", () => {
    finish();
    markPainted("everything");
  });
  events.onerror = () => {
    lost ??= new Date();
    setLive("lost", "Disconnected");
    schedule();
  };
}

// markPainted sets a mark once the next picture is painted.
const markPainted = (name) => requestAnimationFrame(() => setTimeout(() => performance.mark(name)));

// start draws a cluster of many GPUs from an outline, which comes much sooner than all
// that is known of them.
async function start() {
  try {
    const reply = await fetch("outline");
    const outline = reply.ok ? await reply.json() : {nodes: []};
    if (gpusOf(outline.nodes).length > rowsUpTo.cluster) {
      putOutline(outline);
      draw();
      markPainted("outline");
    }
  } catch {
    // the stream, which is asked for next, tells of a lost server
  }
  listen();
}

// The tooltip describes what the mouse or the focus is on, but for the GPU whose details are
// open: they say more, and it would only hide the next row.
function tip(target) {
  const box = el("tip");
  const at = target?.closest?.("[data-use], .gpu, .tile");
  const holder = at?.closest("#map [data-key]");
  if (!holder || holder.dataset.key === place().gpu) {
    box.hidden = true;
    return;
  }
  const node = model.nodes.get(holder.dataset.key.split("/")[0]);
  const g = node?.gpus.find((x) => x.key === holder.dataset.key);
  if (!node || (!g && !holder.matches(".tile"))) return;
  const u = g?.uses[at.dataset.use];
  box.replaceChildren(...(u ? useCard(g, u) : g ? gpuCard(g) : nodeCard(node)));
  box.hidden = false;
  const r = at.getBoundingClientRect(), b = box.getBoundingClientRect();
  const left = Math.max(8, Math.min(r.left, innerWidth - b.width - 8));
  const below = r.bottom + 6 + b.height < innerHeight;
  box.style.left = `${left}px`;
  box.style.top = `${below ? r.bottom + 6 : Math.max(8, r.top - b.height - 6)}px`;
}

// move gives the focus to the nearest element of the map in a direction.
function move(from, dx, dy) {
  const a = from.getBoundingClientRect();
  let best = null, least = Infinity;
  for (const to of el("map").querySelectorAll("[data-nav]")) {
    if (to === from) continue;
    const b = to.getBoundingClientRect();
    const along = dx ? dx * (b.left - a.left) : dy * (b.top - a.top);
    const across = dx ? Math.abs(b.top - a.top) : Math.abs(b.left - a.left);
    if (along > 1 && along + 4 * across < least) [best, least] = [to, along + 4 * across];
  }
  if (best) focusOn(best);
}

// focusOn gives the focus to an element of the map; of GPUs and tiles, Tab leads to that one.
function focusOn(to) {
  if (to.matches("[data-nav]")) {
    el("map").querySelectorAll('[data-nav][tabindex="0"]').forEach((x) => x.setAttribute("tabindex", "-1"));
    to.setAttribute("tabindex", "0");
  }
  to.focus();
}

function keys(e) {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  const typing = e.target.matches("input");
  const arrows = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
  if (e.key === "/" && !typing) {
    e.preventDefault();
    el("query").focus();
    el("query").select();
  } else if (e.key === "Escape") {
    const at = place();
    if (typing) {
      search("");
      el("query").blur();
    } else if (at.gpu) go({gpu: "", use: ""});
    else if (at.node) go({node: ""});
    else if (at.pool) go({pool: ""});
    else if (at.q) search("");
  } else if (arrows[e.key] && e.target.matches("[data-nav]")) {
    e.preventDefault();
    move(e.target, ...arrows[e.key]);
  }
}

// theme follows the system until the user chooses one.
const themes = {"": "Auto", light: "Light", dark: "Dark"};
function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  el("theme").textContent = themes[name];
  el("theme").setAttribute("aria-label", `Theme: ${themes[name]}`);
  el("theme").dataset.theme = name;
}

el("theme").onclick = () => {
  const all = Object.keys(themes);
  const next = all[(all.indexOf(el("theme").dataset.theme) + 1) % all.length];
  localStorage.setItem("theme", next);
  setTheme(next);
};
el("query").oninput = (e) => go({q: e.target.value.trim()}, false);
el("skip").onclick = (e) => {
  e.preventDefault();
  (el("map").querySelector('[data-nav][tabindex="0"]') ?? el("map")).focus();
};
document.addEventListener("keydown", keys);
document.addEventListener("mouseover", (e) => tip(e.target));
document.addEventListener("focusin", (e) => e.target.matches(":focus-visible") && tip(e.target));
document.addEventListener("scroll", () => tip(null), {passive: true});
addEventListener("popstate", schedule);
addEventListener("hashchange", schedule);
setInterval(schedule, 30_000); // ages grow

setTheme(localStorage.getItem("theme") in themes ? localStorage.getItem("theme") : "");
drawLegend();
draw();
start();
