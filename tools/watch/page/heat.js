// The heat map: ranks by section, coloured by the deviation from the rank's class.

import { brush, canvas, colour, element, key, note, panel, share, time } from "./tools.js";

// The rest are waits, which other ranks cause. They are drawn pale.
const OWN = new Set(["F", "B", "I", "W", "SEND_F", "SEND_B", "data"]);
const LABEL = 64, HEAD = 92, LEAST = 3, MOST = 22, HIGH = 620;

// Sorts the rows by a group, stage or host for example, and returns each row's group, or null without one.
function arrange(found, by) {
  const names = found.groups[by];
  if (!names) return null;
  const order = names.map((_, n) => n).sort((a, b) => names[a].localeCompare(names[b], "en", { numeric: true }) || a - b);
  for (const name of ["ranks", "mean_s", "deviation", "alone"]) found[name] = order.map((n) => found[name][n]);
  return order.map((n) => names[n]);
}

export async function heat({ fetched, query, go }) {
  const window_ = query.get("window") ?? "20", found = await fetched(`/api/heat?window=${Number(window_) || 20}`);
  const by = query.get("group") ?? "", names = arrange(found, by);
  const ranks = found.ranks.length, size = Math.max(LEAST, Math.min(MOST, Math.floor(HIGH / Math.max(1, ranks))));
  const rows = Math.min(ranks, Math.floor(HIGH / size));  // the rest is scrolled to: a canvas has a limited height
  const on = canvas(HEAD + rows * size + 2, `Heat map of ${ranks} ranks and ${found.sections.length} sections. Use the arrow keys.`);
  on.tabIndex = 0;
  on.id = "heat";
  const status = element("p", { className: "status", id: "cell", attributes: { "aria-live": "polite" } });
  let row = Math.max(0, found.ranks.indexOf(Number(query.get("rank") ?? -1))), column = Math.max(0, found.sections.findIndex((s) => s.name === query.get("section")));
  let top = Math.max(0, Math.min(ranks - rows, row - Math.floor(rows / 2)));
  const slider = element("input", { type: "range", id: "top", min: 0, max: ranks - rows, value: top, hidden: rows === ranks,
    attributes: { "aria-label": "First shown rank" }, oninput: (event) => scroll(Number(event.target.value)) });
  const describe = () => {
    if (!ranks) return;
    const deviation = found.deviation[row][column], against = found.alone[row] ? "the lower median of all ranks" : "its class";
    status.textContent = `rank ${found.ranks[row]}${names ? ` of ${names[row]}` : ""}, ${found.sections[column].label}: ${time(found.mean_s[row][column])} a step, ${deviation < 0 ? "−" : "+"}${share(Math.abs(deviation), 1)} against ${against}`;
  };
  const drawn = () => {
    const { context, width } = brush(on);
    if (!ranks) return;
    const cell = Math.min(96, (width - LABEL) / found.sections.length);
    const [hot, cold] = [colour("hot"), colour("cold")];
    context.fillStyle = colour("quiet");
    found.sections.forEach((section, n) => {
      context.save();
      context.translate(LABEL + n * cell + cell / 2 - 2, HEAD - 6);
      context.rotate(-Math.PI / 5);
      context.fillText(section.label, 0, 0);
      context.restore();
    });
    const every = Math.ceil(13 / size), pale = colour("quiet");
    found.ranks.slice(top, top + rows).forEach((rank, r) => {
      context.fillStyle = pale;
      if (names && r && names[top + r] !== names[top + r - 1]) context.fillRect(0, HEAD + r * size - 1, width, 1);
      if (r % every === 0) context.fillText(`rank ${rank}`, 0, HEAD + r * size + Math.min(size - 2, size / 2 + 4));
      found.deviation[top + r].forEach((deviation, n) => {
        const strength = Math.min(1, Math.abs(deviation) * 2 + 0.04) * (OWN.has(found.sections[n].name) ? 1 : 0.3);
        context.fillStyle = `rgba(${deviation > 0 ? hot : cold}, ${strength})`;
        context.fillRect(LABEL + n * cell, HEAD + r * size, cell - 1, size > 6 ? size - 1 : size);
      });
    });
    context.strokeStyle = colour("select");
    context.lineWidth = 1.5;
    if (row >= top && row < top + rows) context.strokeRect(LABEL + column * cell, HEAD + (row - top) * size, cell - 1, Math.max(2, size - 1));
  };
  const move = (r, c) => {
    row = Math.max(0, Math.min(ranks - 1, r));
    column = Math.max(0, Math.min(found.sections.length - 1, c));
    top = Math.max(row - rows + 1, Math.min(row, top));
    slider.value = top;
    describe();
    drawn();
  };
  const scroll = (first) => {
    top = Math.max(0, Math.min(ranks - rows, first));
    slider.value = top;
    drawn();
  };
  const keep = () => go({ rank: found.ranks[row], section: found.sections[column].name });
  on.onkeydown = (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-rows, 0], PageDown: [rows, 0] }[event.key];
    if (step) { event.preventDefault(); move(row + step[0], column + step[1]); }
    if (event.key === "Enter") keep();
  };
  const under = (event) => {
    const box = on.getBoundingClientRect(), cell = Math.min(96, (box.width - LABEL) / found.sections.length);
    return [top + Math.floor((event.clientY - box.top - HEAD) / size), Math.floor((event.clientX - box.left - LABEL) / cell)];
  };
  on.onmousemove = (event) => { const [r, c] = under(event); if (r >= top && r < top + rows && c >= 0) move(r, c); };
  if (rows < ranks) on.onwheel = (event) => { event.preventDefault(); scroll(top + Math.sign(event.deltaY) * Math.ceil(rows / 8)); };
  on.onclick = keep;
  describe();
  const texts = [...found.outliers.map((outlier) => outlier.text), ...found.pauses];
  const named = texts.length
    ? element("ul", { id: "outliers" }, ...texts.map((text) => element("li", { textContent: text })))
    : note("No rank deviates from its class, and none pauses.", { id: "outliers" });
  const warning = panel("Outliers", named);
  warning.classList.toggle("warn", texts.length > 0);
  const choice = element("select", { id: "window", onchange: (event) => go({ window: event.target.value }) },
    ...["5", "20", "100", "500"].map((each) => element("option", { value: each, textContent: `last ${each} steps`, selected: each === window_ })));
  const grouping = element("select", { id: "group", onchange: (event) => go({ group: event.target.value || null }) },
    ...["", ...Object.keys(found.groups)].map((each) => element("option", { value: each, textContent: each || "rank", selected: each === by })));
  return {
    children: [warning, panel("", element("div", { className: "bar" }, element("label", {}, "Mean of the ", choice), element("label", {}, "by ", grouping),
      element("span", { className: "quiet", textContent: `steps ${found.first} to ${found.last}` }),
      key("rgb(var(--hot))", "slower"), key("rgb(var(--cold))", "faster than its class"),
      element("span", { className: "quiet", textContent: "waits, which others cause, are pale" })),
    slider, on, status)],
    drawn,
  };
}
