// Elements are made here and nowhere else. Text from the cluster becomes text nodes and
// attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

// h makes an element: h("div.card.big", {title: "x"}, "text", child, …). A handler is
// given as onclick, an attribute as itself; null and false leave things out.
export function h(tag, props, ...children) {
  const [name, ...classes] = tag.split(".");
  return fill(document.createElement(name), classes, props, children);
}

// s makes an SVG element.
export function s(tag, props, ...children) {
  const [name, ...classes] = tag.split(".");
  return fill(document.createElementNS(SVG, name), classes, props, children);
}

function fill(el, classes, props, children) {
  if (classes.length) el.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") el[name] = value;
    else if (name.startsWith("--")) el.style.setProperty(name, value);
    else el.setAttribute(name, value === true ? "" : value);
  }
  el.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false && c !== ""));
  return el;
}

// replace makes these the children of el; it leaves el alone if they are already.
export function replace(el, children) {
  const now = children.flat(Infinity).filter(Boolean);
  if (now.length === el.childNodes.length && now.every((c, i) => el.childNodes[i] === c)) return;
  el.replaceChildren(...now);
}

// plural writes a number with its noun.
export function plural(n, noun) {
  return `${number(n)} ${noun}${n === 1 ? "" : "s"}`;
}

const format = new Intl.NumberFormat("en");
export const number = (n) => format.format(n);

// bytes writes an amount of memory as kubectl gpu map does.
export function bytes(n) {
  for (const [unit, size] of [["Ti", 2 ** 40], ["Gi", 2 ** 30], ["Mi", 2 ** 20]]) {
    if (n >= size) {
      const x = n / size;
      return `${x >= 10 || Number.isInteger(x) ? Math.floor(x) : x.toFixed(1)} ${unit}B`;
    }
  }
  return `${n} B`;
}

// age writes how long ago a time was.
export function age(time) {
  const s = Math.max(0, (Date.now() - Date.parse(time)) / 1000);
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 129600) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} d`;
}
