// What the page knows of the cluster. Nothing here touches the document.

// STATES are those of view.State, in the order in which they are shown.
export const STATES = {
  free: {label: "Free", one: "free", text: "nobody has any of it"},
  partly: {label: "Partly", one: "partly in use", text: "in use, and something else fits"},
  full: {label: "Full", one: "full", text: "in use, and nothing else fits"},
  blocked: {label: "Blocked", one: "blocked", text: "a condition or a taint keeps new claims off"},
  withheld: {label: "Not offered", one: "not offered", text: "nothing of it can be allocated"},
  unknown: {label: "Unknown", one: "unknown", text: "you can't see all claims"},
};

// KINDS are the types of devices that claims have, under the names that kubectl gpu and
// the search have for them.
export const KINDS = {
  gpu: {text: "a whole GPU"},
  mig: {text: "a MIG partition"},
  mps: {text: "an MPS share"},
  timeslice: {text: "a time-sliced replica"},
};

export const model = {
  cluster: null, // of the event of that name
  nodes: new Map(), // by name, as in view.PageNode
  complete: false, // all nodes are there
  outline: false, // all nodes are there, but the nodes are outlines
};

let named = new Set(); // nodes that the stream has named since it began

// reset begins a stream: nodes that it doesn't name are gone.
export function reset() {
  named = new Set();
}

export function putNodes(nodes) {
  for (const n of nodes) {
    for (const g of n.gpus) {
      g.key = `${n.name}/${g.device || `index ${g.index}`}`; // an outline has no UUIDs
      g.node = n;
    }
    model.nodes.set(n.name, n);
    named.add(n.name);
  }
}

// putOutline fills an empty model with outlines of nodes, until the stream replaces them.
export function putOutline({cluster, nodes}) {
  for (const n of nodes) for (const g of n.gpus) Object.assign(g, {uses: [], segments: []});
  model.cluster = cluster;
  putNodes(nodes);
  model.outline = true;
}

export function removeNodes(names) {
  for (const name of names) model.nodes.delete(name);
}

export function finish() {
  removeNodes([...model.nodes.keys()].filter((name) => !named.has(name)));
  model.complete = true;
  model.outline = false;
}

// pools groups nodes, both in the order of their names.
export function pools(nodes) {
  const out = new Map();
  const natural = new Intl.Collator("en", {numeric: true}).compare;
  for (const n of nodes) {
    if (!out.has(n.pool)) out.set(n.pool, []);
    out.get(n.pool).push(n);
  }
  for (const of of out.values()) of.sort((a, b) => natural(a.name, b.name));
  return [...out].map(([name, of]) => ({name, nodes: of})).sort((a, b) => natural(a.name, b.name));
}

export const gpusOf = (nodes) => nodes.flatMap((n) => n.gpus);

// totals adds up GPUs.
export function totals(gpus) {
  const t = {gpus: gpus.length, memory: 0, used: 0, free: 0, gaps: 0, lost: 0, unhealthy: 0, fits: new Map()};
  for (const state of Object.keys(STATES)) t[state] ??= 0;
  t.states = Object.fromEntries(Object.keys(STATES).map((k) => [k, 0]));
  for (const g of gpus) {
    t.states[g.state]++;
    if (g.unhealthy) t.unhealthy++;
    const memory = g.memoryBytes ?? 0;
    const used = memory * g.used;
    t.memory += memory;
    t.used += used;
    if (g.state === "free") t.free += memory - used;
    else if (g.state === "partly" || g.state === "full") t.gaps += memory - used;
    else t.lost += memory - used;
    for (const f of g.fits ?? []) {
      const name = fitName(f);
      const sum = t.fits.get(name) ?? {name, type: f.type, count: 0, most: 0};
      sum.count += f.count;
      sum.most = Math.max(sum.most, f.maxMemoryBytes ?? 0);
      t.fits.set(name, sum);
    }
  }
  t.fits = [...t.fits.values()].filter((f) => f.count > 0);
  return t;
}

// fitName names a kind of device that claims ask for.
export function fitName(f) {
  const gi = (n) => `${Math.floor(n / 2 ** 30)}Gi`;
  if (f.type === "gpu") return "whole";
  if (f.type === "mps" && f.maxMemoryBytes) return "mps";
  if (f.type === "mps") return f.profile ? `mps/${f.profile}` : `mps ${gi(f.memoryBytes ?? 0)}`;
  if (f.type === "timeslice") return "timeslice";
  return f.profile || f.type;
}

// usersOf are those who use a claim: its pods, or its PodGroups if no pod is known.
export function usersOf(u) {
  return u.pods?.length ? u.pods : (u.podGroups ?? []).map((name) => ({name: `podgroup/${name}`}));
}

// useName names who has a use: its users, or its claim in parentheses.
export function useName(u) {
  const users = usersOf(u);
  if (!users.length) return `(${u.claim.name})`;
  return users[0].name + (users.length > 1 ? ` +${users.length - 1}` : "");
}

// useKind says what a use is, as kubectl gpu get does: "mig 3g.40gb", "mps 1/4".
export function useKind(u) {
  return [u.type, u.profile, u.count ? `${(u.number ?? 0) + 1}/${u.count}` : null].filter(Boolean).join(" ");
}

// findings are a GPU's conditions and taints, each with a title.
export function findings(g) {
  const out = (g.conditions ?? []).map((c) => ({title: c.type, text: c.message, since: c.since}));
  const told = new Set(out.map((c) => c.title));
  for (const t of g.taints ?? []) {
    if (!told.has(t.value)) out.push({title: `Taint ${t.key}${t.value ? `=${t.value}` : ""}:${t.effect}`, since: t.since, quiet: t.effect === "None"});
  }
  return out;
}

// filter makes of the search's words a function that says whether a GPU is meant; null
// if there are no words. Words such as is:free ask for one thing, others are looked for
// everywhere.
export function filter(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return null;
  const tests = words.map((w) => {
    const [, field, value] = w.match(/^(is|node|pool|policy|kind|namespace):(.+)$/) ?? [];
    switch (field) {
      case "is": return value === "unhealthy" ? (g) => Boolean(g.unhealthy) : (g) => g.state === value;
      case "node": return (g) => g.node.name.toLowerCase() === value;
      case "pool": return (g) => g.node.pool.toLowerCase().includes(value);
      case "policy": return (g) => (g.policy ?? "").toLowerCase() === value;
      case "kind": return (g) => g.uses.some((u) => u.type === value);
      case "namespace": return (g) => g.uses.some((u) => u.claim.namespace.toLowerCase() === value);
      default: return (g) => haystack(g).includes(w);
    }
  });
  return (g) => tests.every((t) => t(g));
}

function haystack(g) {
  g.text ??= [
    g.node.name, g.node.pool, g.uuid, g.device, g.model, g.policy,
    ...(g.conditions ?? []).map((c) => c.type), ...(g.taints ?? []).map((t) => `${t.key}=${t.value}`),
    ...g.uses.flatMap((u) => [u.device, u.profile, u.claim.namespace, u.claim.name, ...usersOf(u).map((p) => p.name)]),
  ].join("\n").toLowerCase();
  return g.text;
}
