// The views: each returns its elements, and a function that draws its canvases once they have a size.

import { heat } from "./heat.js";
import { timeline } from "./timeline.js";
import { canvas, count, curve, element, facts, key, note, panel, share, table, time } from "./tools.js";

const PALETTE = {
  compute: "F", optimiser: "STEP", "exposed transfers": "send", "exposed collectives": "collective", bubbles: "wait",
  data: "data", other: "quiet",
};

let known = [element("li", { className: "quiet", textContent: "Simulating…" })];

async function overview({ fetched, run }) {
  const metrics = await fetched("/api/metrics");
  const last = run.last, predicted = run.predicted;
  const charts = [
    ["Loss", "loss", last.loss?.toFixed(4) ?? "–", { label: (value) => value.toPrecision(4) }],
    ["Step time", "step_seconds", time(last.step_seconds), { rule: predicted.step_s, zero: true, label: time }],
    ["Tokens per second", "tokens_per_second", count(last.tokens_per_second), { zero: true, label: count }],
    ["Bubble share", "bubble_share", share(last.bubble_share), { rule: predicted.bubble_share, zero: true, label: share }],
    ["Model FLOPs utilisation", "mfu", share(last.mfu, 1), { zero: true, label: (value) => share(value, 1) }],
    ["Memory of the fullest rank", "peak_memory_gb", last.peak_memory_gb ? `${last.peak_memory_gb.toPrecision(3)} GB` : "–", { zero: true, label: (value) => `${value.toPrecision(3)} GB` }],
  ].map(([title, name, now, how]) => {
    const on = canvas(110, `${title} by step, now ${now}`);
    const box = panel("", element("div", { className: "head" }, element("h2", { textContent: title }),
      element("span", { className: "figure", id: `now-${name}`, textContent: now })), on);
    return { box, drawn: () => curve(on, metrics.step, metrics[name], how) };
  });
  const about = facts({
    Model: `${run.model}, ${run.precision}, ZeRO ${run.zero}`,
    Schedule: `${run.schedule}, ${run.microbatches} micro-batches`,
    Layout: `${run.ranks} ranks: ${run.stages} stages, ${run.pipelines} pipelines`,
    Sites: run.sites.join(", "), Hosts: run.hosts.join(", ") || "–",
    Restarts: run.restarts,
    Predicted: `${time(predicted.step_s)} a step, bubbles ${share(predicted.bubble_share)}`,
  });
  const explained = element("ol", { id: "limits" });
  explained.append(...known);
  const explain = async () => {
    const limits = await fetched("/api/explain");
    if (limits === null) { setTimeout(explain, 500); return; }  // they are being computed
    if (typeof limits === "string") { explained.replaceChildren(element("li", { className: "quiet", textContent: limits })); return; }
    known = limits.map((limit) => element("li", { textContent: `${limit.text} (+${share(limit.gain)} tokens/s)` }));
    if (!known.length) known = [element("li", { className: "quiet", textContent: "Nothing found yet." })];
    explained.replaceChildren(...known);
  };
  explain().catch(() => {});
  const alerts = run.alerts.length ? panel("Alerts and faults", element("ul", { id: "alerts" }, ...run.alerts.map((alert) => element("li", {
    textContent: `${new Date(1000 * Number(alert.at)).toLocaleTimeString()} ${alert.event} ${alert.kind}: ${alert.evidence} ${alert.culprit}` })))) : null;
  const log = run.log.length ? panel("Log", element("pre", { id: "log", textContent: run.log.join("\n") })) : null;
  return {
    children: [
      element("div", { className: "grid" }, ...charts.map((chart) => chart.box)),
      element("div", { className: "two" }, panel("What limits this run", explained), panel("This run", about)),
      ...[alerts, log].filter(Boolean),
    ],
    drawn: () => charts.forEach((chart) => chart.drawn()),
  };
}

function chain(ranks, from) {
  const by = new Map(ranks.map((rank) => [rank.rank, rank])), found = [from];
  let at = by.get(from);
  while (at && at.waits_for !== null && !found.includes(at.waits_for)) { found.push(at.waits_for); at = by.get(at.waits_for); }
  return found;
}

async function parallel({ fetched, query, run, go }) {
  const ranks = await fetched("/api/ranks"), chosen = query.has("rank") ? Number(query.get("rank")) : null;
  const picked = ranks.find((rank) => rank.rank === chosen), path = picked ? chain(ranks, chosen) : [];
  const stages = 1 + Math.max(...ranks.map((rank) => rank.stage));
  const cells = ranks.map((rank) => {
    const peer = picked && rank !== picked && (rank.pipeline === picked.pipeline || rank.stage === picked.stage);
    const waits = run.live && rank.waits_for !== null, cause = path.length > 1 && path.at(-1) === rank.rank;
    const state = !run.live ? "" : !rank.alive ? "dead" : waits ? "" : "busy";
    const doing = waits ? `${rank.slot} from rank ${rank.waits_for}` : rank.slot || "–";
    return element("button", {
      id: `rank-${rank.rank}`, className: ["rank", state, peer && "peer", cause && "cause"].filter(Boolean).join(" "),
      style: { gridColumn: rank.stage + 1, gridRow: rank.pipeline + 2 },
      attributes: { "aria-pressed": String(rank.rank === chosen), title: doing },
      onclick: () => go({ rank: rank.rank === chosen ? null : rank.rank }),
    }, element("b", { textContent: `rank ${rank.rank}` }), element("span", { textContent: doing }));
  });
  const heads = Array.from({ length: stages }, (_, stage) => element("span", {
    className: "quiet", style: { gridColumn: stage + 1, gridRow: 1 }, textContent: `stage ${stage}`,
  }));
  const grid = element("div", {
    className: "ranks", style: { gridTemplateColumns: `repeat(${stages}, minmax(104px, 1fr))` },
  }, ...heads, ...cells);
  const peers = (axis) => ranks.filter((rank) => rank !== picked && rank[axis] === picked[axis]).map((rank) => rank.rank).join(", ") || "–";
  const details = picked && panel(`Rank ${picked.rank}`, facts({
    Stage: `${picked.stage} (virtual ${picked.stages.join(", ")})`, Pipeline: picked.pipeline, Site: picked.site,
    Host: picked.host || "–", Step: picked.step, Slot: picked.slot || "–",
    "In this slot for": picked.since && run.live ? time(Math.max(0, Date.now() / 1000 - picked.since)) : "–",
    "Same pipeline": peers("pipeline"), "Same stage": peers("stage"),
    "Waits for": path.length > 1 ? path.slice(1).map((rank) => `rank ${rank}`).join(", which waits for ") : "no other rank",
  }));
  return { children: [
    panel("Pipelines by stage, and what each rank does", element("div", { className: "scroll", dataset: { scroll: "" } }, grid)),
    ...(details ? [details] : [note("Choose a rank to see its peers, and which rank it waits for.")]),
  ] };
}

async function links({ fetched, query, go }) {
  const step = query.get("step"), { step: shown, hops, connections } = await fetched(`/api/links${step ? `?step=${step}` : ""}`);
  const chosen = query.get("hop");
  const rows = [...hops].sort((a, b) => b.crosses - a.crosses || b.fastest_s - a.fastest_s).map((hop) => {
    const id = `${hop.from}-${hop.to}-${hop.kind}`;
    return [
      element("button", {
        id: `hop-${id}`, attributes: { "aria-pressed": String(chosen === id) }, textContent: `${hop.from} → ${hop.to}`,
        onclick: () => go({ hop: chosen === id ? null : id }),
      }),
      hop.kind, hop.crosses ? "between sites" : "inside a site", hop.transfers, `${count(hop.bytes / 1024)} KiB`,
      time(hop.fastest_s), time(hop.median_s), time(hop.planned_s), count(hop.mbps),
    ];
  });
  const picked = hops.find((hop) => `${hop.from}-${hop.to}-${hop.kind}` === chosen);
  return { children: [
    panel(`Transfers of step ${shown}`, hops.length
      ? table(["hop", "carries", "where", ">transfers", ">size", ">fastest", ">median", ">planned", ">Mbit/s at least"], rows)
      : note("There is one stage, so nothing is sent."),
    picked ? element("p", { id: "hop", textContent: `Rank ${picked.from} to rank ${picked.to}: the fastest of ${picked.transfers} transfers took ${time(picked.fastest_s)}; the plan expects ${time(picked.planned_s)}.` }) : null,
    note("From the start of a send until the receiver has the tensor. A receiver that computes looks late, so the fastest transfer is the best estimate of a link.")),
    connections.length ? panel("Links between sites, since they were opened", table(
      ["from → to", "sites", ">connections", ">sent", ">Mbit/s while busy", ">probed", ">round trip", ">queue", ">TCP retransmissions", ">resent chunks", ">cuts"],
      connections.map((link) => [
        element("span", { id: `link-${link.from}-${link.to}`, textContent: `${link.from} → ${link.to}` }), link.sites, link.ready,
        `${count(link.sent_bytes / 2 ** 20)} MiB`, count(link.mbps), count(link.probed_mbps), time(link.rtt_s),
        `${count(link.queued_bytes / 1024)} KiB`, count(link.retransmissions), count(link.resent_chunks), count(link.broken),
      ]))) : null,
  ].filter(Boolean) };
}

function bars(seconds, whole) {
  return element("div", { className: "shares" }, ...Object.keys(PALETTE).map((name) => element("i", {
    style: { width: `${(100 * (seconds[name] ?? 0)) / whole}%`, background: `var(--${PALETTE[name]})` },
    title: `${name}: ${time(seconds[name])}`,
  })));
}

async function where({ fetched, query, go }) {
  const asked = new URLSearchParams([...query].filter(([name]) => name === "step" || name === "against"));
  const found = await fetched(`/api/time?${asked}`);
  if (!found.measured.step) return { children: [note("No step is recorded yet.")] };
  const { measured, predicted, against } = found, other = against?.seconds ?? predicted;
  const whole = Math.max(measured.step, predicted.step, other.step);
  const rows = found.order.map((name) => [
    key(`var(--${PALETTE[name]})`, name),
    element("span", { id: `time-${name.replace(" ", "-")}`, textContent: time(measured[name]) }), share(measured[name] / measured.step),
    time(predicted[name]), share(predicted[name] / predicted.step), ...(against ? [time(other[name])] : []),
    time(Math.abs(measured[name] - other[name])),
  ]);
  const number = element("input", {
    id: "against", type: "number", min: 1, value: query.get("against") ?? "", placeholder: "step",
    onchange: (event) => go({ against: event.target.value || null }),
  });
  const ranks = Object.entries(found.ranks).slice(0, 64).map(([rank, seconds]) => [`rank ${rank}`, bars(seconds, measured.step), time(seconds.compute)]);
  return { children: [
    panel(`Step ${found.step}: ${time(measured.step)}, predicted ${time(predicted.step)}`,
      note("measured, mean of all ranks"), bars(measured, whole),
      note("predicted by the simulator"), bars(predicted, whole),
      ...(against ? [note(`${against.name}, step ${against.step}: ${time(other.step)}`, { id: "other" }), bars(other, whole)] : []),
      element("label", { className: "quiet" }, "compare with step ", number)),
    panel("The largest difference first", table(
      ["", ">measured", ">share", ">predicted", ">share", ...(against ? [`>${against.name}, step ${against.step}`] : []), ">difference"], rows)),
    panel("By rank", table(["", "", ">compute"], ranks, "bars")),
  ] };
}

export const views = { overview, heat, timeline, ranks: parallel, links, time: where };
