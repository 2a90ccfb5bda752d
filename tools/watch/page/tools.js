// Elements, numbers in words, and small canvas charts. Text from a run is only ever set as textContent.

export function element(tag, properties = {}, ...children) {
  const { dataset, style, attributes, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  Object.assign(made.dataset, dataset);
  Object.assign(made.style, style);
  for (const [name, value] of Object.entries(attributes ?? {})) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const panel = (title, ...children) =>
  element("section", { className: "panel" }, title ? element("h2", { textContent: title }) : null, ...children);

export const note = (textContent, properties = {}) => element("p", { className: "quiet", textContent, ...properties });

export const key = (background, text) => element("span", { className: "key" }, element("i", { style: { background } }), text);

export const facts = (named) => element("dl", {}, ...Object.entries(named).flatMap(([name, value]) =>
  [element("dt", { textContent: name }), element("dd", { textContent: String(value) })]));

export function table(heads, rows, className = "") {
  const numeric = heads.map((head) => head.startsWith(">"));
  const line = (cells, tag) => element("tr", {}, ...cells.map((cell, n) => {
    const made = element(tag, { className: numeric[n] ? "n" : "" });
    made.append(cell instanceof Node ? cell : String(cell ?? ""));
    return made;
  }));
  return element("div", { className: "scroll" }, element("table", { className },
    element("thead", {}, line(heads.map((head) => head.replace(/^>/, "")), "th")),
    element("tbody", {}, ...rows.map((row) => line(row, "td")))));
}

export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toPrecision(3)} ms`;
  if (seconds < 100) return `${seconds.toPrecision(3)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export const share = (value, digits = 0) =>
  value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  return value >= 1e3 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(4)).toString();
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export function canvas(height, label) {
  const made = element("canvas", { attributes: { role: "img", "aria-label": label } });
  made.style.height = `${height}px`;
  return made;
}

export function brush(on) {
  const ratio = window.devicePixelRatio || 1, width = on.clientWidth, height = on.clientHeight;
  on.width = Math.max(1, Math.round(width * ratio));
  on.height = Math.max(1, Math.round(height * ratio));
  const context = on.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height };
}

const TOP = 16;

export function curve(on, xs, ys, { rule = null, zero = false, label = null } = {}) {
  const points = xs.map((x, n) => [x, ys[n]]).filter(([, y]) => y !== null && y !== undefined);
  const { context, width, height } = brush(on);
  if (!points.length) return;
  const values = points.map(([, y]) => y), shown = rule === null ? values : [...values, rule];
  let low = zero ? 0 : Math.min(...shown), high = Math.max(...shown);
  if (high - low < 1e-12) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  const first = points[0][0], last = Math.max(points.at(-1)[0], first + 1), left = 2, bottom = height - 16;
  const at = (x) => left + ((x - first) / (last - first)) * (width - left - 4);
  const up = (y) => bottom - ((y - low) / (high - low)) * (bottom - TOP);
  context.strokeStyle = colour("line");
  context.fillStyle = colour("quiet");
  for (const y of [TOP, bottom]) { context.beginPath(); context.moveTo(left, y + 0.5); context.lineTo(width, y + 0.5); context.stroke(); }
  context.fillText(String(first), left, height - 3);
  context.textAlign = "right";
  context.fillText(String(last), width - 2, height - 3);
  if (rule !== null) {
    context.setLineDash([4, 3]);
    context.strokeStyle = colour("quiet");
    context.beginPath(); context.moveTo(left, up(rule)); context.lineTo(width, up(rule)); context.stroke();
    context.setLineDash([]);
    context.fillText("predicted", width - 2, up(rule) > TOP + 16 ? up(rule) - 4 : up(rule) + 12);
  }
  if (label) {
    context.textAlign = "left";
    context.fillText(label(high), left, TOP - 4);
    if (low) context.fillText(label(low), left, bottom - 4);
  }
  context.strokeStyle = colour("accent");
  context.lineWidth = 1.4;
  context.beginPath();
  points.forEach(([x, y], n) => (n ? context.lineTo(at(x), up(y)) : context.moveTo(at(x), up(y))));
  context.stroke();
  const [x, y] = points.at(-1);
  context.fillStyle = colour("accent");
  context.beginPath(); context.arc(at(x), up(y), 2.5, 0, 7); context.fill();
}
