"use strict";
// Numbers to text, and small charts. Everything that a server said goes in as text, never as HTML.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const PARTS = ["dense", "pack", "wire", "queue", "compute", "local", "combine", "other"];
const LAYER_PARTS = PARTS.slice(0, -1);
const MIB = 1 << 20, GIB = 1 << 30;

const sum = (values) => values.reduce((total, value) => total + value, 0);

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function draw(tag, attributes, title) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (title) {
    const told = document.createElementNS(SVG, "title");
    told.textContent = title;
    element.append(told);
  }
  return element;
}

// As many children as values; each is made once and filled again.
function fill(parent, values, create, update) {
  while (parent.children.length > values.length) parent.lastChild.remove();
  while (parent.children.length < values.length) parent.append(create(parent.children.length));
  values.forEach((value, i) => update(parent.children[i], value, i));
}

const whole = (value) => Math.round(value).toLocaleString("en-US");

function number(value) {
  if (value === null) return "–";
  const size = Math.abs(value);
  return size >= 100 || value === 0 ? whole(value) : value.toFixed(size >= 10 ? 1 : 2);
}

function seconds(value) {
  if (value === null) return "–";
  if (value >= 1) return number(value) + " s";
  return value >= 0.001 || value === 0 ? number(1000 * value) + " ms" : number(1e6 * value) + " µs";
}

function percent(value) {
  if (value === null) return "–";
  return (100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0) + " %";
}

const memory = (bytes) => bytes >= GIB ? number(bytes / GIB) + " GiB" : number(bytes / MIB) + " MiB";

function span(seconds) {
  if (seconds < 90) return whole(seconds) + " s";
  if (seconds < 5400) return whole(seconds / 60) + " min";
  return seconds < 172800 ? whole(seconds / 3600) + " h" : whole(seconds / 86400) + " days";
}

// A bar of parts side by side: [{name, value, text}], as wide as `most`.
function stack(element, parts, most) {
  const shown = parts.filter((part) => part.value > 0);
  fill(element, shown, () => make("span"), (bar, part) => {
    bar.className = "part p-" + part.name;
    bar.style.width = 100 * part.value / most + "%";
    bar.title = part.text;
    say(bar, part.value / most > 0.09 ? part.name : "");
  });
  element.setAttribute("aria-label", shown.map((part) => part.text).join(", "));
}

// The ranges of whole numbers that the buckets of a histogram stand for.
function ranges(bounds) {
  const names = bounds.map((bound, i) => {
    const least = i ? bounds[i - 1] + 1 : bound;
    return least === bound ? String(bound) : least + "–" + bound;
  });
  return [...names, bounds[bounds.length - 1] + 1 + "+"];
}

function bars(element, histogram) {
  const names = ranges(histogram.bounds), last = histogram.counts.reduce((last, n, i) => n ? i : last, -1);
  const first = histogram.counts.findIndex(Boolean);
  const rows = names.map((name, i) => ({ name, n: histogram.counts[i] })).slice(Math.max(0, first), last + 1);
  const most = Math.max(1, ...rows.map((row) => row.n));
  fill(element, rows, () => {
    const row = make("div");
    row.append(make("span"), make("i"), make("span"));
    row.children[1].append(make("b"));
    return row;
  }, (row, { name, n }) => {
    say(row.children[0], name);
    row.children[1].firstChild.style.width = 100 * n / most + "%";
    say(row.children[2], percent(n / histogram.n));
    row.title = name + ": " + whole(n);
  });
  element.setAttribute("aria-label", rows.map(({ name, n }) => name + ": " + whole(n)).join(", ") || "none");
}

// points: [[seconds, value]], the newest last; `width_s` seconds wide.
function sparkline(svg, points, width_s) {
  const end = points[points.length - 1][0], most = Math.max(1e-9, ...points.map((point) => point[1]));
  const x = (at) => 1000 * (1 - (end - at) / width_s), y = (value) => 98 - 94 * value / most;
  const line = points.map(([at, value]) => x(at).toFixed(1) + "," + y(value).toFixed(1)).join(" ");
  if (!svg.firstChild) {
    svg.setAttribute("viewBox", "0 0 1000 100");
    svg.append(draw("polygon", { class: "area" }), draw("polyline", { class: "line" }));
  }
  svg.firstChild.setAttribute("points", x(points[0][0]).toFixed(1) + ",100 " + line + " 1000,100");
  svg.lastChild.setAttribute("points", line);
  return most;
}

// Round marks for an axis up to `most`.
function ticks(most) {
  const rough = most / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((each) => each * power >= rough * 0.99);
  return Array.from({ length: Math.floor(most / step * 0.97) + 1 }, (_, i) => i * step);
}

// The same time in as few letters as a round mark needs.
function tick(value) {
  const short = (value) => String(Number(value.toPrecision(3)));
  if (value === 0) return "0";
  return value >= 1 ? short(value) + " s" : value >= 0.001 ? short(1000 * value) + " ms" : short(1e6 * value) + " µs";
}

// One row for each layer, its parts side by side; in sequence each begins where the one before has ended.
function waterfall(svg, layers, inSequence) {
  const total = layers.map((layer) => sum(LAYER_PARTS.map((part) => layer[part])));
  const most = (inSequence ? sum(total) : Math.max(...total)) || 1;
  const pieces = [];
  let begun = 0;
  layers.forEach((layer, row) => {
    let at = inSequence ? begun : 0;
    for (const part of LAYER_PARTS) {
      if (layer[part] > 0) pieces.push({ row, part, at, width: layer[part] });
      at += layer[part];
    }
    begun += total[row];
  });
  svg.setAttribute("viewBox", "0 0 1000 " + 10 * layers.length);
  fill(svg, pieces, () => draw("rect", { height: 7 }, " "), (rect, { row, part, at, width }) => {
    rect.setAttribute("class", "p-" + part);
    rect.setAttribute("x", (1000 * at / most).toFixed(2));
    rect.setAttribute("width", Math.max(0.3, 1000 * width / most - 0.6).toFixed(2));
    rect.setAttribute("y", 10 * row + 1.5);
    say(rect.firstChild, "layer " + row + ", " + part + ": " + seconds(width));
  });
  return most;
}
