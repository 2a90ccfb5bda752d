// The timeline: a step of all ranks, measured above predicted, with the dependencies of a chosen action.

import { brush, canvas, colour, element, panel, time } from "./tools.js";

const ROW = 15, GAP = 12, LABEL = 64, AXIS = 18;
const WAITS = { RECV_F: 1, RECV_B: 1, gradients: 2, weights: 2, sums: 2 };
const KEYS = { F: "forward", B: "backward", W: "weight gradient", STEP: "optimiser", send: "send", collective: "wait for collectives", wait: "wait for a transfer", data: "data" };

function fill(kind) {
  if (WAITS[kind]) return WAITS[kind] === 1 ? "wait" : "collective";
  if (kind.startsWith("SEND") || kind.includes(">")) return "send";
  return { F: "F", B: "B", I: "I", W: "W", STEP: "STEP", data: "data", REDUCE_GRAD: "reduce", UNSHARD: "reduce", reduce: "reduce" }[kind] ?? "stall";
}

const kindOf = (slot) => slot.replace(/^\(?\d+/, "").replace(/\d*(;.*)?$/, "");

export async function timeline({ fetched, query, go }) {
  const step = query.get("step"), found = await fetched(`/api/timeline${step ? `?step=${step}` : ""}`);
  const ranks = [...new Set([...found.spans, ...found.predicted].map(([rank]) => rank))].sort((a, b) => a - b);
  const whole = Math.max(found.step_s, 1e-9), both = Math.max(found.step_s, found.predicted_step_s, 1e-9);
  const place = new Map(ranks.map((rank, n) => [rank, n])), line = new Map();
  found.needs.forEach((needs, n) => Object.values(needs).flat().forEach(([rank]) => line.set(rank, n)));
  const measured = found.spans.map(([rank, kind, slot, start, end]) => ({ rank, kind, slot, start, end, upper: true }));
  const predicted = found.predicted.map(([rank, lane, slot, start, end]) =>
    ({ rank, kind: lane === "compute" ? kindOf(slot) : lane, slot, start, end, upper: false }));
  const spans = [...measured, ...predicted];
  const bySlot = new Map(measured.map((span) => [`${span.rank} ${span.slot}`, span]));
  const height = ranks.length * (2 * ROW + GAP) + AXIS;
  const on = canvas(height, `Timeline of step ${found.step}, ${ranks.length} ranks. Arrow keys choose an action, plus and minus zoom.`);
  on.tabIndex = 0;
  on.id = "timeline";
  let chosen = bySlot.get(`${query.get("rank")} ${query.get("slot")}`) ?? null, zoom = 1, left = 0;
  const status = element("p", { className: "status", id: "action", attributes: { "aria-live": "polite" } });
  const direct = (span) => (found.needs[line.get(span.rank) ?? 0]?.[span.slot] ?? []).map(([rank, slot]) => bySlot.get(`${rank} ${slot}`)).filter(Boolean);
  // An input is received in this rank's row. So the send on the other rank is shown as well.
  const needsOf = (span) => direct(span).flatMap((need) => (need.slot.includes("RECV") ? [need, ...direct(need)] : [need]));
  const top = (span) => AXIS + place.get(span.rank) * (2 * ROW + GAP) + (span.upper ? 0 : ROW);
  const scale = () => ((on.clientWidth - LABEL) / both) * zoom;
  const at = (seconds) => LABEL + (seconds - left) * scale();
  const tell = () => {
    if (!chosen) { status.textContent = "Choose an action to see what it depends on."; return; }
    const needs = needsOf(chosen).map((need) => `${need.slot} on rank ${need.rank} (ended ${time(Math.max(0, chosen.start - need.end))} before)`);
    status.textContent = `${chosen.slot} on rank ${chosen.rank}: ${time(chosen.end - chosen.start)} from ${time(chosen.start)}${chosen.upper ? "" : " (predicted)"}${needs.length ? `. Needs ${needs.join("; ")}.` : "."}`;
  };
  const drawn = () => {
    const { context, width } = brush(on), palette = {};
    const paint = (name) => (palette[name] ??= colour(name));
    context.fillStyle = paint("quiet");
    ranks.forEach((rank, n) => context.fillText(`rank ${rank}`, 0, AXIS + n * (2 * ROW + GAP) + 12));
    for (let n = 0; n <= 4; n += 1) {
      const seconds = left + (n * both) / zoom / 4;
      context.textAlign = n === 4 ? "right" : "left";
      context.fillText(time(seconds), Math.min(width - 2, at(seconds)), 11);
    }
    context.textAlign = "left";
    context.save();
    context.beginPath();
    context.rect(LABEL, AXIS, width - LABEL, height);
    context.clip();
    for (const span of spans) {
      const x = at(span.start), wide = Math.max(0.75, (span.end - span.start) * scale());
      if (x > width || x + wide < LABEL) continue;
      const small = WAITS[span.kind] || span.kind.includes(">") || span.kind.startsWith("SEND");
      context.globalAlpha = span.upper ? 1 : 0.55;
      context.fillStyle = paint(fill(span.kind));
      context.fillRect(x, top(span) + (small ? 4 : 0), wide - (wide > 3 ? 0.5 : 0), small ? ROW - 9 : ROW - 2);
      if (wide > 30 && !small) {
        context.globalAlpha = 1;
        context.fillStyle = "#fff";
        context.fillText(span.slot, x + 3, top(span) + 10, wide - 5);
      }
    }
    context.globalAlpha = 1;
    if (chosen) {
      context.strokeStyle = paint("select");
      for (const need of needsOf(chosen)) {
        context.beginPath();
        context.moveTo(at(need.end), top(need) + ROW / 2);
        context.lineTo(at(chosen.start), top(chosen) + ROW / 2);
        context.stroke();
        context.strokeRect(at(need.start), top(need), Math.max(2, (need.end - need.start) * scale()), ROW - 2);
      }
      context.lineWidth = 2;
      context.strokeRect(at(chosen.start), top(chosen), Math.max(2, (chosen.end - chosen.start) * scale()), ROW - 2);
      context.lineWidth = 1;
    }
    context.restore();
  };
  const choose = (span) => { chosen = span; tell(); drawn(); };
  const pan = (to) => { left = Math.max(0, Math.min(to, both - both / zoom)); drawn(); };
  const magnify = (by, around = left + both / zoom / 2) => {
    const before = both / zoom, portion = (around - left) / before;
    zoom = Math.max(1, Math.min(500, zoom * by));
    pan(around - (portion * both) / zoom);
  };
  on.onclick = (event) => {
    const box = on.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const hit = spans.filter((span) => y >= top(span) && y < top(span) + ROW && x >= at(span.start) - 1 && x <= Math.max(at(span.end), at(span.start) + 3));
    choose(hit.at(-1) ?? null);
    if (chosen?.upper) history.replaceState(null, "", `#timeline?${new URLSearchParams({ step: found.step, rank: chosen.rank, slot: chosen.slot })}`);
  };
  on.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    magnify(event.deltaY < 0 ? 1.25 : 0.8, left + (event.offsetX - LABEL) / scale());
  }, { passive: false });
  on.onkeydown = (event) => {
    const row = measured.filter((span) => span.rank === (chosen?.rank ?? ranks[0])), n = row.indexOf(chosen);
    const near = (rank) => measured.filter((span) => span.rank === rank).reduce((best, span) =>
      (!best || Math.abs(span.start - (chosen?.start ?? 0)) < Math.abs(best.start - (chosen?.start ?? 0)) ? span : best), null);
    const turn = ranks.indexOf(chosen?.rank ?? ranks[0]);
    const done = {
      ArrowRight: () => choose(row[Math.min(row.length - 1, n + 1)] ?? chosen), ArrowLeft: () => choose(row[Math.max(0, n - 1)] ?? chosen),
      ArrowDown: () => choose(near(ranks[Math.min(ranks.length - 1, turn + 1)])), ArrowUp: () => choose(near(ranks[Math.max(0, turn - 1)])),
      "+": () => magnify(1.5, chosen?.start), "-": () => magnify(1 / 1.5, chosen?.start),
    }[event.key];
    if (done && row.length) { event.preventDefault(); done(); }
  };
  tell();
  const input = element("input", { type: "number", id: "step", min: 1, value: found.step, onchange: (event) => go({ step: event.target.value, rank: null, slot: null }) });
  const bar = element("div", { className: "bar" }, element("label", {}, "Step ", input),
    element("button", { textContent: "newest", onclick: () => go({ step: null, rank: null, slot: null }) }),
    element("button", { textContent: "−", attributes: { "aria-label": "zoom out" }, onclick: () => magnify(1 / 1.5) }),
    element("button", { textContent: "+", attributes: { "aria-label": "zoom in" }, onclick: () => magnify(1.5) }),
    element("a", { href: `/api/perfetto?step=${found.step}`, textContent: "for Perfetto", attributes: { download: `step${found.step}.json` } }),
    ...Object.entries(KEYS).map(([name, text]) => element("span", { className: "key" }, element("i", { style: { background: `var(--${name})` } }), text)));
  return {
    children: [panel(`Step ${found.step}: ${time(whole)} measured (above), ${time(found.predicted_step_s)} predicted (below)`, bar,
      element("div", { className: "scroll", dataset: { scroll: "" } }, on), status)],
    drawn,
  };
}
