// GPUs as they are drawn: a bar with everything in it, or a cell among thousands.

import {age, bytes, h, plural, s} from "./dom.js";
import {STATES, KINDS, fitName, findings, useKind, useName, usersOf} from "./model.js";

const percent = (x) => `${(100 * x).toFixed(4)}%`;

// cell is the size of a GPU's cell, in the units of its node's picture.
const cell = {width: 7, height: 9, gap: 1.5, columns: 4};

// shapes are the paths of the cells of some GPUs, by the part that they draw. Each state
// has a form of its own, so that none is told by its colour alone: free is hollow, use
// fills from below, blocked is crossed, what isn't offered is struck through.
function shapes(gpus, columns) {
  const d = {box: "", unknown: "", used: "", blocked: "", cross: "", off: "", mark: ""};
  gpus.forEach((g, i) => {
    if (!g) return;
    const {width: w, height: t, gap} = cell;
    const x = (i % columns) * (w + gap) + 0.5, y = Math.floor(i / columns) * (t + gap) + 0.5;
    if (g.state === "blocked") {
      d.blocked += `M${x} ${y}h${w}v${t}h${-w}z`;
      d.cross += `M${x + 1.7} ${y + 2.5}l${w - 3.4} ${t - 5}m0 ${5 - t}l${3.4 - w} ${t - 5}`;
      return;
    }
    d[g.state === "unknown" ? "unknown" : "box"] += `M${x} ${y}h${w}v${t}h${-w}z`;
    const u = g.state === "full" ? 1 : g.used;
    if (u > 0) d.used += `M${x} ${y + t}v${-t * u}h${w}v${t * u}z`;
    if (g.state === "withheld") d.off += `M${x + 1} ${y + t - 1}L${x + w - 1} ${y + 1}`;
    if (g.unhealthy) d.mark += `M${x + w} ${y}v4.5l-4.5-4.5z`;
  });
  return Object.entries(d).filter(([, path]) => path).map(([part, path]) => s(`path.${part}`, {d: path}));
}

// cells draws GPUs as a block of cells; those that the filter doesn't mean are faint.
export function cells(gpus, means = null) {
  const columns = Math.min(cell.columns, Math.max(1, gpus.length));
  const rows = Math.ceil(gpus.length / columns);
  const width = columns * (cell.width + cell.gap) - cell.gap + 1, height = rows * (cell.height + cell.gap) - cell.gap + 1;
  const groups = means
    ? [s("g.faint", null, shapes(gpus.map((g) => (means(g) ? null : g)), columns)), s("g", null, shapes(gpus.map((g) => (means(g) ? g : null)), columns))]
    : shapes(gpus, columns);
  return s("svg.cells", {viewBox: `0 0 ${width} ${height}`, "--w": width, "--h": height, "aria-hidden": "true"}, groups);
}

// glyph is the cell of a state, for legends and counts.
export function glyph(state) {
  return cells([{state, used: {full: 1, partly: 0.5}[state] ?? 0}]);
}

// tile is a node as a button with a cell for each GPU.
export function tile(node, means, open) {
  return h("button.tile", {
    type: "button", "data-nav": true, "data-key": node.name, tabindex: -1, "aria-label": nodeText(node), onclick: () => open(node.name),
  }, cells(node.gpus, means));
}

// nodeText says in words what a node's tile shows.
export function nodeText(node) {
  const counts = Object.entries(STATES).map(([k, v]) => [node.gpus.filter((g) => g.state === k).length, v.one]).filter(([n]) => n);
  return `${node.name}, ${plural(node.gpus.length, "GPU")}: ${counts.map(([n, word]) => `${n} ${word}`).join(", ")}`;
}

// bar draws a GPU's memory from left to right, with everything that has a part of it.
export function bar(g) {
  const parts = (g.instances ?? []).map((x) => h("span.seg.foreign", {
    "--from": percent(x.placement.start / (g.memorySlices || 1)), "--size": percent(x.placement.size / (g.memorySlices || 1)), "data-instance": x.profile,
  }, h("b", null, x.profile)));
  for (const seg of g.segments) {
    const uses = seg.uses.map((i) => g.uses[i]);
    const u = uses[0];
    parts.push(h(`span.seg.k-${u.type}${uses.some((x) => usersOf(x).length) ? "" : ".idle"}`, {
      "--from": percent(seg.start), "--size": percent(seg.size), "data-use": seg.uses[0],
    }, h("b", null, useName(u) + (uses.length > 1 ? ` +${uses.length - 1}` : "")), u.profile ? h("i", null, u.profile) : null));
  }
  return h("span.bar", {"data-state": g.state, "data-slices": g.memorySlices || null}, ticks(g.memorySlices ?? 0), parts);
}

// ticks are the limits of memory slots.
function ticks(slots) {
  if (slots < 2) return null;
  let d = "";
  for (let i = 1; i < slots; i++) d += `M${i} 0v1`;
  return s("svg.ticks", {viewBox: `0 0 ${slots} 1`, preserveAspectRatio: "none", "aria-hidden": "true"}, s("path", {d, "vector-effect": "non-scaling-stroke"}));
}

// room says what else fits, in so many characters, as kubectl gpu map does.
export function room(g, width = Infinity) {
  const fits = (g.fits ?? []).filter((f) => f.count > 0);
  switch (true) {
    case !g.offered: return "not offered";
    case !g.fits: return "?";
    case fits.length > 0: return shorten(fits.map(fitText), width);
    case g.state === "blocked": return "blocked";
    case g.state === "full": return "full";
    default: return "nothing";
  }
}

function shorten(words, width) {
  for (let n = words.length; n > 1; n--) {
    const text = words.slice(0, n).join("  ") + (n < words.length ? `  +${words.length - n}` : "");
    if (text.length <= width) return text;
  }
  return words[0] + (words.length > 1 ? `  +${words.length - 1}` : "");
}

export function fitText(f) {
  if (f.type === "gpu" && f.count === 1) return "whole";
  return `${f.count}×${fitName(f)}${f.maxMemoryBytes ? ` ≤${Math.floor(f.maxMemoryBytes / 2 ** 30)}Gi` : ""}`;
}

// row is a GPU as a button with its bar.
export function row(g, selected, select) {
  const bad = findings(g).filter((t) => !t.quiet);
  return h("li", null,
    h("button.gpu", {
      type: "button", "data-nav": true, "data-key": g.key, tabindex: -1, "aria-label": gpuText(g), "aria-pressed": String(selected),
      "data-state": g.state, onclick: (e) => select(g.key, e.target.closest("[data-use]")?.dataset.use),
    },
    h("span.index", null, g.index >= 0 ? String(g.index) : "?"), bar(g),
    h("span.room", null, bad.length ? h("em", null, "! ", bad[0].title) : null, h("span", null, room(g, 20)))));
}

// gpuText says in words what a GPU's row shows.
export function gpuText(g) {
  const parts = [`GPU ${g.index} of ${g.node.name}`, g.model, STATES[g.state].one, ...findings(g).map((t) => t.title)];
  for (const u of g.uses) parts.push(`${useKind(u)}: ${useName(u)}`);
  const fits = room(g);
  return `${parts.filter(Boolean).join(", ")}; what else fits: ${fits}`;
}

// useCard describes a use, for the tooltip and for the inspector.
export function useCard(g, u) {
  const facts = [useKind(u), u.memoryBytes ? bytes(u.memoryBytes) : null, u.threadPercentage ? `${u.threadPercentage} % of the threads` : null,
    u.placement ? `slots ${u.placement.start} to ${u.placement.start + u.placement.size - 1}` : null,
    u.adminAccess ? "watches only (admin access)" : null, u.leftover ? "no longer offered" : null];
  const users = usersOf(u);
  return [
    h("div.who", null, users.length ? users.map((p) => h("div", null, h("b", null, p.name), p.phase ? h("span.phase", null, p.phase) : null)) : h("b.none", null, "no pod uses it")),
    h("div.facts", null, h(`span.dot.k-${u.type}`, {"aria-hidden": "true"}), facts.filter(Boolean).join(" · ")),
    h("div.facts", null, `claim ${u.claim.namespace}/${u.claim.name}`),
  ];
}

// gpuCard describes a GPU in the tooltip.
export function gpuCard(g) {
  return [
    h("div.who", null, h("b", null, `GPU ${g.index}`), ` of ${g.node.name}`, h("span.phase", {"data-state": g.state}, STATES[g.state].label)),
    h("div.facts", null, [g.model, g.memoryBytes ? bytes(g.memoryBytes) : null, g.policy ? `policy ${g.policy}` : null].filter(Boolean).join(" · ")),
    ...findings(g).map((t) => h("div.bad", null, `! ${t.title}${t.since ? `, for ${age(t.since)}` : ""}`)),
    h("div.facts", null, `else fits: ${room(g)}`),
  ];
}

// nodeCard describes a node in the tooltip of its tile.
export function nodeCard(node) {
  const used = new Set(node.gpus.flatMap((g) => g.uses.flatMap((u) => usersOf(u).map((p) => p.name))));
  const kinds = Object.keys(KINDS).map((k) => [node.gpus.flatMap((g) => g.uses).filter((u) => u.type === k).length, k]).filter(([n]) => n);
  return [
    h("div.who", null, h("b", null, node.name), h("span.phase", null, plural(node.gpus.length, "GPU"))),
    h("div.facts", null, nodeText(node).split(": ")[1] ?? ""),
    kinds.length ? h("div.facts", null, kinds.map(([n, word]) => `${n} ${word}`).join(", ")) : null,
    used.size ? h("div.facts", null, [...used].slice(0, 4).join(", ") + (used.size > 4 ? ` and ${used.size - 4} more pods` : "")) : null,
    ...(node.problems ?? []).map((p) => h("div.bad", null, `! ${p}`)),
  ].filter(Boolean);
}
