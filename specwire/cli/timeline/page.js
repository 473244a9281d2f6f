"use strict";
// Times are nanoseconds from the start of the generation. `data` is what page.py's `_data` says.
const data = JSON.parse(document.getElementById("data").textContent);
const chart = document.getElementById("chart"), strip = document.getElementById("strip");
const tip = document.getElementById("tip");
const LEFT = data.left, FIRST_ROUNDS = 24, MIN_NS = 1000, DENSE = 300;
const whole = [data.start, Math.max(data.end, data.start + MIN_NS)];
let view = whole, width = 1200, scheduled = false;

function element(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}
const toX = ns => LEFT + (ns - view[0]) / (view[1] - view[0]) * (width - LEFT);
const toNs = x => view[0] + (x - LEFT) / (width - LEFT) * (view[1] - view[0]);

// One path for all bars of a kind: thousands of elements would make panning slow.
function path(bars, x, y, height, least) {
  let d = "";
  for (const [start, end, row] of bars) {
    const from = Math.max(LEFT, x(start)), to = Math.min(width, x(end));
    if (to < LEFT || from > width || to < from) continue;
    d += `M${from.toFixed(2)},${y(row)}h${Math.max(to - from, least).toFixed(2)}v${height}H${from.toFixed(2)}z`;
  }
  return d;
}
const set = (id, d) => { const at = document.getElementById(id); if (at) at.setAttribute("d", d); };

function draw() {
  scheduled = false;
  const rounds = data.rounds.filter(r => r.end >= view[0] && r.start <= view[1]);
  const least = rounds.length > DENSE ? 0 : 0.8; // a least width would make dense pictures look busy
  for (const [name, bars] of Object.entries(data.bars))
    set(`bars-${name}`, path(bars, toX, row => data.rows[row] + 2, data.row - 4, least));
  for (const mark of data.marks) {
    const marked = rounds.filter(r => r.mark === mark).map(r => [r.start, r.end, 0]);
    set(`rounds-${mark}`, path(marked, toX, row => data.rows[row] + 1, data.row - 2, least));
    document.getElementById(`rounds-${mark}`).setAttribute("stroke-width", least ? 1 : 0);
  }
  set("overlaps", path(data.overlaps, toX, () => data.both[0], data.both[1] - data.both[0], 0));
  drawLabels(rounds);
  drawTicks();
  const across = ns => LEFT + (ns - whole[0]) / (whole[1] - whole[0]) * (width - LEFT);
  const [from, to] = view.map(across), frame = document.getElementById("view");
  frame.setAttribute("x", from);
  frame.setAttribute("width", Math.max(3, to - from));
}
function drawLabels(rounds) {
  const labels = document.getElementById("labels");
  labels.replaceChildren();
  for (const r of rounds) {
    const from = Math.max(LEFT, toX(r.start)), to = Math.min(width, toX(r.end));
    const text = r.labels.find(label => label.length * 7 + 6 < to - from);
    if (text) element("text", {x: (from + to) / 2, y: data.rows[0] + data.row / 2 + 4}, labels, text);
  }
  for (const [start, end, row, text, kind] of data.labels) {
    const from = Math.max(LEFT, toX(start)), to = Math.min(width, toX(end)), y = data.rows[row] + data.row / 2 + 4;
    if (kind === "event" && LEFT <= from && from < width) element("text", {x: from + 5, y, class: kind}, labels, text);
    else if (text.length * 7 + 6 < to - from)
      element("text", {x: (from + to) / 2, y, class: "on-bar"}, labels, text);
  }
}
function drawTicks() {
  const ticks = document.getElementById("ticks");
  ticks.replaceChildren();
  const rough = (view[1] - view[0]) / Math.max(2, (width - LEFT) / 110), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(times => times * power >= rough);
  for (let i = Math.ceil(view[0] / step); i * step <= view[1]; i++) {
    const x = toX(i * step);
    element("line", {x1: x, x2: x, y1: 0, y2: data.bottom}, ticks);
    const anchor = x > width - 40 ? "end" : "middle";
    element("text", {x, y: data.bottom + 16, "text-anchor": anchor}, ticks, time(i * step, step));
  }
}
function time(ns, step = 0) {
  const [unit, name] = Math.max(Math.abs(ns), step && view[1]) >= 1e10 ? [1e9, "s"] : [1e6, "ms"];
  const digits = step ? Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9)) : 3;
  return `${(ns / unit).toFixed(digits)} ${name}`;
}

function show(from, to) {
  const span = Math.min(Math.max(to - from, MIN_NS), whole[1] - whole[0]);
  const start = Math.min(Math.max(from, whole[0]), whole[1] - span);
  view = [start, start + span];
  if (!scheduled) { scheduled = true; requestAnimationFrame(draw); }
}
function zoom(factor, at = (view[0] + view[1]) / 2) {
  show(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
}
const pan = fraction => show(...view.map(ns => ns + fraction * (view[1] - view[0])));
const showRound = r => show(r.start - 0.2 * (r.end - r.start), r.end + 0.2 * (r.end - r.start));
function resize() {
  width = Math.max(400, chart.clientWidth || 1200);
  chart.setAttribute("viewBox", `0 0 ${width} ${data.height}`);
  strip.setAttribute("viewBox", `0 0 ${width} 22`);
  const kept = view;
  view = whole;
  for (const mark of data.marks) {
    const marked = data.rounds.filter(r => r.mark === mark).map(r => [r.start, r.end, 0]);
    set(`strip-${mark}`, path(marked, toX, () => 3, 16, 0));
  }
  view = kept;
  draw();
}

// What is under the pointer: of bars on top of each other the shortest, and near misses count.
function find(x, y) {
  const row = data.rows.findIndex(top => y >= top && y < top + data.row), at = toNs(x);
  const slack = 3 * (view[1] - view[0]) / (width - LEFT);
  let best = null;
  const look = (start, end, of, found) => {
    if (of === row && start - slack <= at && at <= end + slack && (!best || end - start < best.end - best.start))
      best = {start, end, ...found};
  };
  for (const bars of Object.values(data.bars))
    for (const [start, end, of, title, span] of bars) look(start, end, of, {title: data.texts[title], span});
  for (const r of data.rounds) look(r.start, r.end, 0, {title: `round ${r.labels[0]}`, span: r.span});
  return best;
}
function explain(event) {
  const box = chart.getBoundingClientRect(), scale = width / box.width;
  const found = find((event.clientX - box.left) * scale, (event.clientY - box.top) * scale);
  tip.style.display = found ? "block" : "none";
  if (!found) return;
  tip.replaceChildren();
  const title = document.createElement("strong"), list = document.createElement("dl");
  title.textContent = found.title;
  const attributes = data.spans[found.span] || [];
  const pairs = [["start", time(found.start)], ["duration", time(found.end - found.start)]];
  for (let i = 0; i < attributes.length; i += 2)
    pairs.push([data.texts[attributes[i]], data.texts[attributes[i + 1]]]);
  for (const pair of pairs)
    ["dt", "dd"].forEach((name, i) => {
      const made = document.createElement(name);
      made.textContent = pair[i];
      list.append(made);
    });
  tip.append(title, list);
  tip.style.left = `${Math.max(0, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(0, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
}

let dragged = null;
chart.addEventListener("wheel", event => {
  event.preventDefault();
  const box = chart.getBoundingClientRect();
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
    pan((event.deltaX || event.deltaY) / box.width);
  else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.002))), toNs((event.clientX - box.left) * width / box.width));
}, {passive: false});
chart.addEventListener("pointerdown", event => {
  dragged = {x: event.clientX, view};
  chart.setPointerCapture(event.pointerId);
  chart.classList.add("dragging");
});
chart.addEventListener("pointermove", event => {
  if (!dragged) return explain(event);
  tip.style.display = "none";
  const box = chart.getBoundingClientRect(), moved = (event.clientX - dragged.x) * width / box.width;
  const ns = moved / (width - LEFT) * (dragged.view[1] - dragged.view[0]);
  show(dragged.view[0] - ns, dragged.view[1] - ns);
});
for (const name of ["pointerup", "pointercancel"])
  chart.addEventListener(name, () => { dragged = null; chart.classList.remove("dragging"); });
chart.addEventListener("pointerleave", () => { tip.style.display = "none"; });
chart.addEventListener("keydown", event => {
  const act = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.7), "=": () => zoom(0.7),
    "-": () => zoom(1.4), 0: () => show(...whole), Escape: () => { tip.style.display = "none"; },
  }[event.key];
  if (act && !event.ctrlKey && !event.metaKey) { event.preventDefault(); act(); }
});
strip.addEventListener("pointerdown", event => {
  const box = strip.getBoundingClientRect(), x = (event.clientX - box.left) * width / box.width;
  const at = whole[0] + (x - LEFT) / (width - LEFT) * (whole[1] - whole[0]), half = (view[1] - view[0]) / 2;
  show(at - half, at + half);
});
document.getElementById("in").addEventListener("click", () => zoom(0.6));
document.getElementById("out").addEventListener("click", () => zoom(1.7));
document.getElementById("left").addEventListener("click", () => pan(-0.5));
document.getElementById("right").addEventListener("click", () => pan(0.5));
document.getElementById("all").addEventListener("click", () => show(...whole));
document.getElementById("rounds").addEventListener("click", event => {
  const button = event.target.closest("button");
  if (button) { showRound(data.rounds[Number(button.dataset.index)]); chart.scrollIntoView({block: "nearest"}); }
});
addEventListener("resize", resize);
if (data.rounds.length > FIRST_ROUNDS) view = [whole[0], data.rounds[FIRST_ROUNDS - 1].end];
resize();
