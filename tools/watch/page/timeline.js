// The timeline: a step of all ranks, measured above predicted, with the dependencies of a chosen action, and lanes of
// transfers, of prefills in bubbles, and of uplinks between sites.

import { AXIS, inWords, LANE, layout, ROW } from "./lanes.js";
import { brush, canvas, colour, element, key, note, panel, share, time } from "./tools.js";

const LABEL = 64;
const WAITS = { RECV_F: 1, RECV_B: 1, gradients: 2, weights: 2, sums: 2 };
const KEYS = { F: "forward", B: "backward", W: "weight gradient", STEP: "optimiser", send: "send", collective: "wait for collectives", wait: "wait for a transfer", data: "data", prefill: "prefill" };

function fill(kind) {
  if (WAITS[kind]) return WAITS[kind] === 1 ? "wait" : "collective";
  if (kind.startsWith("SEND") || kind === "transfer") return "send";
  return { F: "F", B: "B", I: "I", W: "W", STEP: "STEP", data: "data", prefill: "prefill", REDUCE_GRAD: "reduce", UNSHARD: "reduce", reduce: "reduce" }[kind] ?? "stall";
}

export async function timeline({ fetched, query, go }) {
  const step = query.get("step"), found = await fetched(`/api/timeline${step ? `?step=${step}` : ""}`);
  const ranks = [...new Set([...found.spans, ...found.predicted].map(([rank]) => rank))].sort((a, b) => a - b);
  const whole = Math.max(found.step_s, 1e-9), both = Math.max(found.step_s, found.predicted_step_s, 1e-9);
  const line = new Map();
  found.needs.forEach((needs, n) => Object.values(needs).flat().forEach(([rank]) => line.set(rank, n)));
  const { blocks, spans, lanes, height } = layout(ranks, found);
  const measured = spans.filter((span) => span.upper && span.lane === "slots" && span.rank !== undefined);
  const bySlot = new Map(measured.map((span) => [`${span.rank} ${span.slot}`, span]));
  const on = canvas(height, `Timeline of step ${found.step}, ${ranks.length} ranks. Arrow keys choose an action, with Shift also transfers and prefills; plus and minus zoom.`);
  on.tabIndex = 0;
  on.id = "timeline";
  let chosen = bySlot.get(`${query.get("rank")} ${query.get("slot")}`) ?? null, zoom = 1, left = 0;
  const status = element("p", { className: "status", id: "action", attributes: { "aria-live": "polite" } });
  const direct = (span) => (found.needs[line.get(span.rank) ?? 0]?.[span.slot] ?? []).map(([rank, slot]) => bySlot.get(`${rank} ${slot}`)).filter(Boolean);
  // An input is received in this rank's row. So the send on the other rank is shown as well.
  const needsOf = (span) => direct(span).flatMap((need) => (need.slot.includes("RECV") ? [need, ...direct(need)] : [need]));
  const tall = (span) => (span.lane === "slots" ? ROW : LANE);
  const scale = () => ((on.clientWidth - LABEL) / both) * zoom;
  const at = (seconds) => LABEL + (seconds - left) * scale();
  const describe = () => {
    if (!chosen) { status.textContent = "Choose an action to see what it depends on."; return; }
    const needs = chosen.peer === undefined ? needsOf(chosen).map((need) => `${need.slot} on rank ${need.rank} (ended ${time(Math.max(0, chosen.start - need.end))} before)`) : [];
    status.textContent = `${inWords(chosen)}${needs.length ? `. Needs ${needs.join("; ")}.` : "."}`;
  };
  const drawn = () => {
    const { context, width } = brush(on), palette = {};
    const paint = (name) => (palette[name] ??= colour(name));
    context.fillStyle = paint("quiet");
    for (const block of blocks) block.name.forEach((word, n) => context.fillText(word, 0, block.top + 12 + n * ROW, LABEL - 4));
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
      const small = WAITS[span.kind] || span.kind.startsWith("SEND");
      context.globalAlpha = (span.upper ? 1 : 0.55) * (span.exact === false ? 0.6 : 1);
      context.fillStyle = paint(fill(span.kind));
      context.fillRect(x, span.top + (small ? 4 : 0), wide - (wide > 3 ? 0.5 : 0), small ? ROW - 9 : tall(span) - 2);
      if (wide > 30 && !small && span.lane === "slots") {
        context.globalAlpha = 1;
        context.fillStyle = "#fff";
        context.fillText(span.slot, x + 3, span.top + 10, wide - 5);
      }
    }
    context.globalAlpha = 1;
    if (chosen) {
      context.strokeStyle = paint("select");
      for (const need of chosen.peer === undefined ? needsOf(chosen) : []) {
        context.beginPath();
        context.moveTo(at(need.end), need.top + ROW / 2);
        context.lineTo(at(chosen.start), chosen.top + ROW / 2);
        context.stroke();
        context.strokeRect(at(need.start), need.top, Math.max(2, (need.end - need.start) * scale()), ROW - 2);
      }
      context.lineWidth = 2;
      context.strokeRect(at(chosen.start), chosen.top, Math.max(2, (chosen.end - chosen.start) * scale()), tall(chosen) - 2);
      context.lineWidth = 1;
    }
    context.restore();
  };
  const choose = (span) => { chosen = span; describe(); drawn(); };
  const pan = (to) => { left = Math.max(0, Math.min(to, both - both / zoom)); drawn(); };
  const magnify = (by, around = left + both / zoom / 2) => {
    const before = both / zoom, portion = (around - left) / before;
    zoom = Math.max(1, Math.min(500, zoom * by));
    pan(around - (portion * both) / zoom);
  };
  const under = (event) => {
    const box = on.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    return spans.filter((span) => y >= span.top && y < span.top + tall(span) && x >= at(span.start) - 1 && x <= Math.max(at(span.end), at(span.start) + 3)).at(-1);
  };
  on.onmousemove = (event) => { const hit = under(event); on.title = hit ? inWords(hit) : ""; };
  on.onclick = (event) => {
    choose(under(event) ?? null);
    if (measured.includes(chosen)) history.replaceState(null, "", `#timeline?${new URLSearchParams({ step: found.step, rank: chosen.rank, slot: chosen.slot })}`);
  };
  on.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    magnify(event.deltaY < 0 ? 1.25 : 0.8, left + (event.offsetX - LABEL) / scale());
  }, { passive: false });
  on.onkeydown = (event) => {
    const own = lanes.find((lane) => lane.spans.includes(chosen)) ?? lanes.find((lane) => lane.block === chosen?.block) ?? lanes[0];
    const shown = lanes.filter((lane) => event.shiftKey || lane.isMain || lane === own), turn = shown.indexOf(own), n = own?.spans.indexOf(chosen);
    const begun = chosen?.start ?? 0;
    const near = (lane) => lane.spans.reduce((best, span) => (Math.abs(span.start - begun) < Math.abs(best.start - begun) ? span : best));
    const done = {
      ArrowRight: () => choose(own.spans[Math.min(own.spans.length - 1, n + 1)]), ArrowLeft: () => choose(own.spans[Math.max(0, n - 1)]),
      ArrowDown: () => choose(near(shown[Math.min(shown.length - 1, turn + 1)])), ArrowUp: () => choose(near(shown[Math.max(0, turn - 1)])),
      "+": () => magnify(1.5, chosen?.start), "-": () => magnify(1 / 1.5, chosen?.start),
    }[event.key];
    if (done && own) { event.preventDefault(); done(); }
  };
  describe();
  const { hosts, bound_s: bound, unknown } = found.clocks;
  const clocks = hosts > 1 ? note([
    hosts > unknown.length + 1 ? `Clocks of ${hosts - unknown.length} hosts are lined up by their transfers, to within ${time(bound)} of the first one's.` : "",
    unknown.length ? `Nothing passes between the first host and ${unknown.slice(0, 8).join(", ")}${unknown.length > 8 ? " and others" : ""}, whose clocks are as they were.` : "",
  ].join(" "), { id: "clocks" }) : null;
  const timer = found.timer_share === null ? null : note(`Timing took a rank at most ${share(found.timer_share, 3)} of this step.`, { id: "timer" });
  const input = element("input", { type: "number", id: "step", min: 1, value: found.step, onchange: (event) => go({ step: event.target.value, rank: null, slot: null }) });
  const bar = element("div", { className: "bar" }, element("label", {}, "Step ", input),
    element("button", { textContent: "newest", onclick: () => go({ step: null, rank: null, slot: null }) }),
    element("button", { textContent: "−", attributes: { "aria-label": "zoom out" }, onclick: () => magnify(1 / 1.5) }),
    element("button", { textContent: "+", attributes: { "aria-label": "zoom in" }, onclick: () => magnify(1.5) }),
    element("a", { href: `/api/perfetto?step=${found.step}`, textContent: "for Perfetto", attributes: { download: `step${found.step}.json` } }),
    ...Object.entries(KEYS).filter(([name]) => name !== "prefill" || found.prefills.length).map(([name, text]) => key(`var(--${name})`, text)));
  return {
    children: [panel(`Step ${found.step}: ${time(whole)} measured (above), ${time(found.predicted_step_s)} predicted (below)`, bar,
      element("div", { className: "scroll", dataset: { scroll: "" } }, on), status, clocks, timer)],
    drawn,
  };
}
