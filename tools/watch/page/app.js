// The page's frame: which view is shown, links to it, and news of the run.

import { note, time } from "./tools.js";
import { views } from "./views.js";

const main = document.getElementById("main");
const REST_MS = 1500;
let shown = null, drawing = 0, last = 0, due = null;

function place() {
  const [view, query = ""] = location.hash.slice(1).split("?");
  return { view: views[view] ? view : "overview", query: new URLSearchParams(query) };
}

function go(changes, view = place().view) {
  const { query } = place();
  for (const [name, value] of Object.entries(changes)) value === null ? query.delete(name) : query.set(name, value);
  const text = query.toString();
  location.hash = text ? `${view}?${text}` : view;
}

async function fetched(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

async function header() {
  const run = await fetched("/api/overview");
  document.title = `${run.name} – weft watch`;
  document.getElementById("name").textContent = run.name;
  document.getElementById("dot").classList.toggle("live", run.live);
  const left = run.left_s ? `, ${time(run.left_s)} left` : "";
  document.getElementById("state").textContent = `${run.live ? "running" : "ended"}, step ${run.step} of ${run.steps}${left}`;
  return run;
}

async function draw() {
  const turn = ++drawing, { view, query } = place();
  for (const link of document.querySelectorAll("nav a")) {
    link.hash === `#${view}` ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
  try {
    const run = await header();
    const made = await views[view]({ fetched, query, run, go });
    if (turn !== drawing) return;
    const focused = document.activeElement?.id, moved = [...document.querySelectorAll("[data-scroll]")].map((e) => e.scrollLeft);
    main.replaceChildren(...made.children);
    made.drawn?.();
    [...document.querySelectorAll("[data-scroll]")].forEach((e, n) => { e.scrollLeft = moved[n] ?? 0; });
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    shown = made;
    document.body.dataset.view = view;
  } catch (error) {
    if (turn === drawing) main.replaceChildren(note(`Not available: ${error.message}`));
  }
  last = performance.now();
}

function news() {
  if (due !== null || place().query.has("step")) return;
  due = setTimeout(() => { due = null; draw(); }, Math.max(0, REST_MS - (performance.now() - last)));
}

window.addEventListener("hashchange", draw);
window.addEventListener("resize", () => shown?.drawn?.());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown?.drawn?.());
draw().then(() => {
  let first = true;
  new EventSource("/events").onmessage = () => { first ? (first = false) : news(); };
});
