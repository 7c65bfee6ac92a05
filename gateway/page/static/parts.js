// Small parts that the page is drawn with. Text goes in as text: nothing that comes from outside becomes HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function mark(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function wide(node, share) {
  const width = `${(100 * Math.max(0, Math.min(1, share))).toFixed(1)}%`;
  if (node.style.width !== width) node.style.width = width;
}

// The values of the last two minutes, one a second, as a line with its area. `most`: at least the top of the chart.
export class Trend {
  constructor(most) {
    this.most = most;
    this.values = [];
    this.line = draw("polyline", { class: "trend-line", "vector-effect": "non-scaling-stroke" });
    this.area = draw("polygon", { class: "trend-area" });
    this.node = draw("svg", { class: "trend", viewBox: "0 0 120 30", preserveAspectRatio: "none", "aria-hidden": "true" }, this.area, this.line);
  }

  add(value) {
    this.values.push(value ?? 0);
    if (this.values.length > 120) this.values.shift();
    const top = Math.max(this.most, ...this.values);
    const from = 120 - this.values.length + 1;
    const points = this.values.map((one, i) => `${from + i},${(29 - (27 * one) / top).toFixed(1)}`);
    this.line.setAttribute("points", points.join(" "));
    this.area.setAttribute("points", `${from},30 ${points.join(" ")} 120,30`);
  }
}

export function meter(label) {
  const bar = make("span", { class: "fill" });
  const value = make("span", { class: "value" });
  const node = make("div", { class: "meter" }, make("span", { class: "label" }, label), make("span", { class: "track", "aria-hidden": "true" }, bar), value);
  return { node, set: (share, text) => (wide(bar, share ?? 0), say(value, text)) };
}

// Nodes by key in the order of `items`: new ones are made, others stay; the ones that are no longer wanted are dropped.
export function keyed(parent, nodes, items, key, create, update) {
  const wanted = new Set(items.map(key));
  for (const [name, one] of nodes) {
    if (!wanted.has(name)) {
      one.node.remove();
      nodes.delete(name);
    }
  }
  items.forEach((item, index) => {
    const name = key(item);
    if (!nodes.has(name)) nodes.set(name, create(item));
    const one = nodes.get(name);
    update(one, item);
    if (parent.children[index] !== one.node) parent.insertBefore(one.node, parent.children[index] ?? null);
  });
}

// What a request of the page's own brought back; `signal` may abort it. Throws the server's sentence.
export async function ask(path, body, signal = AbortSignal.timeout(30000)) {
  const options = body === undefined ? {} : { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(path, { credentials: "same-origin", signal, ...options });
  if (!answer.ok) {
    const told = await answer.json().catch(() => ({}));
    const error = new Error(told.error?.message ?? `the service answered with status ${answer.status}`);
    error.status = answer.status;
    throw error;
  }
  return answer;
}
