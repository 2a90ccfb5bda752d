// The lanes of the timeline: a block for each rank, measured above predicted, and one for each uplink between sites.

import { time } from "./tools.js";

export const ROW = 15, LANE = 6, AXIS = 18;
const GAP = 12;
const kindOf = (slot) => slot.replace(/^\(?\d+/, "").replace(/\d*(;.*)?$/, "");

export function layout(ranks, found) {
  const blocks = [], spans = [], byLane = new Map();
  const has = { sends: found.transfers.length > 0, prefills: found.prefills.length > 0 };
  const heights = { slots: ROW, sends: has.sends ? LANE : 0, prefills: has.prefills ? LANE : 0 };
  const half = ROW + heights.sends, uplinks = [...new Set([...found.transfers, ...found.predicted_transfers].map(([, , uplink]) => uplink))].filter(Boolean).sort();
  const place = new Map();
  let top = AXIS;
  for (const key of [...ranks, ...uplinks]) {
    const isRank = typeof key === "number";
    place.set(key, blocks.length);
    blocks.push({ name: isRank ? [`rank ${key}`] : key.split(/(?<=→) /), top });
    top += (isRank ? 2 * half + heights.prefills : 2 * ROW) + GAP;
  }
  const offset = { slots: 0, sends: ROW, prefills: half };
  const put = (key, lane, upper, span) => {
    const block = place.get(key), lower = typeof key === "number" ? half + heights.prefills : ROW;
    spans.push({ ...span, block, lane, upper, top: blocks[block].top + offset[lane] + (upper ? 0 : lower) });
    if (!upper) return;
    const name = `${block} ${lane}`;
    if (!byLane.has(name)) byLane.set(name, { block, isMain: lane === "slots", order: block * 3 + Object.keys(offset).indexOf(lane), spans: [] });
    byLane.get(name).spans.push(spans.at(-1));
  };
  for (const [rank, kind, slot, start, end] of found.spans) put(rank, "slots", true, { rank, kind, slot, start, end });
  for (const [rank, lane, slot, start, end] of found.predicted) put(rank, "slots", false, { rank, kind: lane === "compute" ? kindOf(slot) : lane, slot, start, end });
  for (const [rank, kind, slot, start, end] of found.prefills) put(rank, "prefills", true, { on: rank, kind, slot: `${slot} tokens`, start, end });
  for (const [upper, transfers] of [[true, found.transfers], [false, found.predicted_transfers]]) {
    for (const [from, peer, uplink, slot, start, end, exact] of transfers) {
      const span = { on: from, peer, uplink, kind: "transfer", slot, start, end, exact };
      put(from, "sends", upper, span);
      if (uplink) put(uplink, "slots", upper, span);
    }
  }
  const lanes = [...byLane.values()].sort((a, b) => a.order - b.order);
  return { blocks, spans, lanes, height: top };
}

export function inWords(span) {
  const lasts = `${time(span.end - span.start)} from ${time(span.start)}${span.upper ? "" : " (predicted)"}`;
  if (span.peer === undefined) return `${span.slot} on rank ${span.rank ?? span.on}: ${lasts}`;
  return `${span.slot} from rank ${span.on} to rank ${span.peer}${span.uplink ? ` over ${span.uplink}` : ""}: ${span.exact ? "" : "at most "}${lasts}`;
}
