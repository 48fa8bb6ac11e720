// Everything around the map: totals, what needs attention, the selected GPU, policies
// and the legend.

import {age, bytes, h, number, plural, replace} from "./dom.js";
import {KINDS, STATES, totals, findings} from "./model.js";
import {bar, fitText, glyph, useCard} from "./draw.js";

const el = (id) => document.getElementById(id);

// drawTotals draws the counts of what is in view. Each is a button that filters by it.
export function drawTotals(gpus, nodes, query, search) {
  const t = totals(gpus);
  const tiles = Object.entries(STATES).filter(([k]) => t.states[k] || ["free", "partly", "full", "blocked"].includes(k)).map(([k, v]) => {
    const word = `is:${k}`, on = query.split(/\s+/).includes(word);
    return h("button.total", {
      type: "button", "data-state": k, "data-count": t.states[k], "data-zero": String(t.states[k] === 0), "aria-pressed": String(on), title: `${v.label}: ${v.text}`,
      onclick: () => search(on ? query.replace(word, "") : `${query.replace(/\bis:\S+/g, "")} ${word}`),
    }, glyph(k), h("b", null, number(t.states[k])), h("span", null, v.label));
  });
  const all = h("div.total.all", {"data-count": t.gpus}, h("b", null, number(t.gpus)), h("span", null, `GPU${t.gpus === 1 ? "" : "s"} on ${plural(nodes.length, "node")}`));
  replace(el("totals"), [h("div.counts", null, all, tiles), memoryCard(t), fitsCard(t)]);
}

// memoryCard shows where the memory is: in use, free beside uses, on free GPUs.
function memoryCard(t) {
  const parts = [
    ["used", t.used, "allocated"], ["gaps", t.gaps, "left on GPUs in use"], ["free", t.free, "on free GPUs"], ["lost", t.lost, "not available"],
  ].filter(([, n]) => n > 0.5);
  const share = (n) => (t.memory ? Math.round((100 * n) / t.memory) : 0);
  return h("div.memory", null,
    h("h2", null, "Memory", h("b", null, `${share(t.used)} % of ${bytes(t.memory)} allocated`)),
    h("div.stack", {role: "img", "aria-label": parts.map(([, n, word]) => `${bytes(n)} ${word}`).join(", ")},
      parts.map(([k, n]) => h(`span.${k}`, {"--size": `${t.memory ? (100 * n) / t.memory : 0}%`}))),
    h("ul.keys", null, parts.map(([k, n, word]) => h("li", null, h(`i.${k}`, {"aria-hidden": "true"}), `${bytes(n)} ${word}`))));
}

function fitsCard(t) {
  return h("div.fits", null,
    h("h2", null, "Room for", h("span", null, "each kind alone")),
    t.fits.length
      ? h("ul.chips", null, t.fits.map((f) => h("li", {"data-fit": f.name, "data-count": f.count}, h("b", null, number(f.count)), `× ${f.name}`, f.most ? ` ≤${bytes(f.most)}` : null)))
      : h("p", null, t.states.unknown ? "Unknown: you can't see all claims." : "Nothing."));
}

// reasons are the answers to why pods wait, by namespace/name, and the scheduler's word
// for which they were asked.
const reasons = new Map();

async function ask(pod, draw) {
  const key = `${pod.namespace}/${pod.name}`;
  reasons.set(key, {asked: pod.message, text: ""});
  draw();
  try {
    const reply = await fetch(`why?${new URLSearchParams({namespace: pod.namespace, pod: pod.name})}`);
    if (!reply.ok) throw new Error(await reply.text());
    reasons.set(key, {asked: pod.message, ...(await reply.json())});
  } catch (e) {
    reasons.set(key, {asked: pod.message, text: `No answer: ${e.message}`});
  }
  draw();
}

// asksAtOnce: reasons of so many pods are asked for without a click, where there are
// few GPUs.
const asksAtOnce = 4;
// listed is how many of a kind the panel lists.
const listed = 8;

// startsWithin is how long, in milliseconds, a node takes to start a pod that isn't listed.
const startsWithin = 30_000;

// drawAttention lists what an administrator should look at.
export function drawAttention(cluster, nodes, small, select, search) {
  const draw = () => drawAttention(cluster, nodes, small, select, search);
  const waiting = (cluster.waiting ?? []).filter((p) => !p.node || Date.now() - Date.parse(p.since) > startsWithin);
  const unhealthy = nodes.flatMap((n) => n.gpus).filter((g) => findings(g).some((t) => !t.quiet));
  const impaired = nodes.filter((n) => n.problems?.length);
  const parts = [];
  if (waiting.length) {
    parts.push(h("h3", null, `Waiting ${waiting.length === 1 ? "pod" : "pods"}`, h("b", {"data-count": waiting.length}, number(waiting.length))),
      h("ul.items", {"data-list": "waiting"}, first("waiting", waiting).map((p, i) => waitingPod(p, small && i < asksAtOnce, draw))), more("waiting", waiting, draw));
  }
  if (unhealthy.length) {
    parts.push(h("h3", null, "Unhealthy or tainted GPUs", h("b", {"data-count": unhealthy.length}, number(unhealthy.length))),
      h("ul.items", {"data-list": "unhealthy"}, first("unhealthy", unhealthy).map((g) => h("li", null, h("button.item", {type: "button", "data-key": `unhealthy ${g.key}`, onclick: () => select(g.key)},
        unhealthyGPU(g, unhealthy.length <= told))))), more("unhealthy", unhealthy, draw));
  }
  if (impaired.length) {
    parts.push(h("h3", null, "Nodes with problems", h("b", {"data-count": impaired.length}, number(impaired.length))),
      h("ul.items", {"data-list": "nodes"}, first("nodes", impaired).map((n) => h("li", null, h("button.item", {type: "button", "data-key": `node with problems ${n.name}`, onclick: () => search(`node:${n.name}`)},
        h("span.title", null, h("b", null, n.name)), n.problems.map((p) => h("span.text", null, p)))))), more("nodes", impaired, draw));
  }
  if (!parts.length) parts.push(h("p.fine", null, h("i", {"aria-hidden": "true"}, "✓"), " No pod waits for a GPU, and no GPU is unhealthy or tainted."));
  keepFocus(() => replace(el("attention"), [h("h2", null, "Needs attention"), ...parts]));
}

// told: up to so many unhealthy GPUs are listed with their conditions' messages.
const told = 4;
function unhealthyGPU(g, atLength) {
  const bad = findings(g).filter((t) => !t.quiet);
  const title = h("b", null, `${g.node.name} · GPU ${g.index}`);
  if (!atLength) return h("span.title", null, title, h("span.bad", null, bad[0].title));
  return [h("span.title", null, title), bad.map((t) => h("span.bad", null, t.title, t.since ? h("time", null, `for ${age(t.since)}`) : null)), h("span.text", null, bad[0].text ?? "")];
}

const whole = new Set(); // lists that the user wants whole

const first = (name, list) => (whole.has(name) ? list : list.slice(0, listed));

function more(name, list, draw) {
  if (list.length <= listed || whole.has(name)) return null;
  return h("button.quiet", {type: "button", "data-key": `more ${name}`, onclick: () => {
    whole.add(name);
    draw();
  }}, `Show all ${number(list.length)}`);
}

function waitingPod(p, atOnce, draw) {
  const key = `${p.namespace}/${p.name}`;
  const known = reasons.get(key);
  const stale = known && known.asked !== p.message;
  if (atOnce && (!known || stale)) queueMicrotask(() => ask(p, draw));
  return h("li.item", null,
    h("span.title", null, h("b", null, p.name), h("span", null, p.namespace), h("time", null, age(p.since))),
    known?.text ? [h("span.text", null, known.text), known.change ? h("span.text.change", null, known.change) : null,
      known.also?.map((text) => h("span.text", null, text)),
      known.notLookedAt?.length ? h("span.text", null, `Not looked at: ${known.notLookedAt.join("; ")}.`) : null]
      : h("span.text.quote", null, known ? "Asking …" : p.message || (p.node ? `It is on ${p.node}, which hasn't started it.` : "The scheduler hasn't looked at it yet.")),
    !known || stale || (known.text && (p.node || !atOnce)) ? h("button.quiet", {type: "button", "data-key": `why ${key}`, onclick: () => ask(p, draw)}, known ? "Ask again" : "Why?") : null);
}

// keepFocus draws, and gives the focus back to what had it.
export function keepFocus(draw) {
  const key = document.activeElement?.dataset?.key;
  draw();
  if (key && document.activeElement?.dataset?.key !== key) {
    document.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({preventScroll: true});
  }
}

// drawInspector shows everything about one GPU.
export function drawInspector(g, use, close) {
  const box = el("inspector");
  box.hidden = !g;
  if (!g) return replace(box, []);
  const facts = [["Model", g.model], ["Memory", g.memoryBytes ? bytes(g.memoryBytes) : null], ["Policy", g.policy], ["Pool", g.node.pool],
    ["Driver", g.node.driverVersion], ["Device", g.device], ["UUID", g.uuid]].filter(([, v]) => v);
  const fits = (g.fits ?? []).filter((f) => f.count > 0);
  const bad = findings(g);
  keepFocus(() => replace(box, [
    h("div.head", null, h("h2", {tabindex: -1, "data-key": "inspector"}, `${g.node.name} · GPU ${g.index >= 0 ? g.index : "?"}`),
      h("span.state", {"data-state": g.state}, glyph(g.state), STATES[g.state].label),
      h("button.quiet", {type: "button", "aria-label": "Close", "data-key": "close", onclick: close}, "✕")),
    bad.map((t) => h("div.alarm", null, h("b", null, t.title), t.since ? h("time", null, `for ${age(t.since)}`) : null, t.text ? h("p", null, t.text) : null)),
    bar(g), g.memorySlices ? h("p.small", null, `${g.memorySlices} memory slots`) : null,
    h("h3", null, "In use by", h("b", null, number(g.uses.length))),
    g.uses.length
      ? h("ul.uses", null, g.uses.map((u, i) => h("li", {"data-use": i, "aria-current": String(i) === use ? "true" : null}, useCard(g, u),
        h("code", null, `kubectl describe resourceclaim -n ${u.claim.namespace} ${u.claim.name}`))))
      : h("p.small", null, "Nobody."),
    (g.instances ?? []).length ? [h("h3", null, "MIG instances of others"), h("ul.uses", null, g.instances.map((x) => h("li", null, `${x.profile} at slot ${x.placement.start}`)))] : null,
    h("h3", null, "What else fits"),
    fits.length ? h("ul.chips", null, fits.map((f) => h("li", null, fitText(f)))) : h("p.small", null, g.fits ? "Nothing." : "Unknown: you can't see all claims."),
    h("dl", null, facts.map(([k, v]) => [h("dt", null, k), h("dd", null, v)])),
  ]));
  if (use !== undefined) box.querySelector('[aria-current="true"]')?.scrollIntoView({block: "nearest"});
}

// drawPolicies lists the SharingPolicies.
export function drawPolicies(policies, search) {
  replace(el("policies"), policies?.length ? [
    h("h2", null, "Sharing policies"),
    h("ul.items", null, policies.map((p) => h("li", null, h("button.item", {type: "button", "data-key": `policy ${p.name}`, onclick: () => search(`policy:${p.name}`)},
      h("span.title", null, h("b", null, p.name), h("span", null, `${plural(p.gpus, "GPU")} on ${plural(p.nodes, "node")}`), p.applied ? h("span.ok", null, "applied") : null),
      (p.problems ?? []).map((t) => h("span.text", null, t)))))),
  ] : []);
}

// drawLegend explains forms and colours. It is drawn once.
export function drawLegend() {
  replace(el("legend"), [
    h("h2", null, "Legend"),
    h("ul.legend", null,
      Object.values(STATES).map((v, i) => h("li", null, glyph(Object.keys(STATES)[i]), h("b", null, v.label), ` ${v.text}`)),
      h("li", null, h("i.corner", {"aria-hidden": "true"}), h("b", null, "Corner"), " it has a condition or a taint"),
      Object.entries(KINDS).map(([k, v]) => h("li", null, h(`i.seg.k-${k}`, {"aria-hidden": "true"}), h("b", null, k), ` ${v.text}`)),
      h("li", null, h("i.seg.k-mig.idle", {"aria-hidden": "true"}), h("b", null, "(name)"), " a claim that no pod uses"),
      h("li", null, h("i.seg.foreign", {"aria-hidden": "true"}), h("b", null, "MIG instance"), " that others than Tessera made")),
    h("p.small", null, "Arrow keys move, Enter opens, Esc goes back, / searches. In the search, is:free, is:blocked, is:unhealthy, node:, pool:, policy:, kind: and namespace: ask for one thing."),
  ]);
}

