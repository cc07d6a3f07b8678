"use strict";
// Draws the charts of a benchmark report from the results embedded in the page. No library.
const RUNS = JSON.parse(document.getElementById("results").textContent);
const MIX = "all", IDLE = "concurrency=1", BURST = "burst";
const PHASES = [["draft", "--s2", "draft"], ["verify", "--s1", "verify"],
  ["compact", "--s4", "move KV"], ["rest", "--grid", "rest: prefill, plain steps, idle"]];
const state = { axis: "rate", hidden: new Set() };
const charts = [];

// Series: one server of one run. Colours follow the server's name, so that two runs share them.
const names = [...new Set(RUNS.flatMap(run => run.servers.map(server => server.name)))];
const SERIES = RUNS.flatMap((run, number) => run.servers
  .filter(server => run.points.some(point => point.server === server.name))
  .map(server => ({
    id: `${number}/${server.name}`, name: server.name, run: number,
    label: RUNS.length > 1 ? `${server.name} · ${run.label}` : server.name,
    color: `var(--s${names.indexOf(server.name) ? (names.indexOf(server.name) - 1) % 7 + 1 : 0})`,
    points: run.points.filter(point => point.server === server.name),
    crossover: (run.crossover || {})[server.name],
  })));
const visible = () => SERIES.filter(series => !state.hidden.has(series.id));
const hasRates = RUNS.some(run => run.points.some(p => p.prompts === MIX && p.label.endsWith("/s")));
const hasCounts = RUNS.some(run => run.points.some(
  p => p.prompts === MIX && p.concurrency !== null && p.concurrency > 1));
if (!hasRates && hasCounts) state.axis = "concurrency";

// Small helpers

function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "circle", "text", "rect", "polygon", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter(child => child !== null));
  return node;
}

function format(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size >= 100) return value.toFixed(0);
  return String(+value.toPrecision(size >= 10 ? 3 : size >= 1 ? 3 : 2));
}

// At most `count` round numbers over [low, high].
function ticks(low, high, count, log) {
  if (log) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const digit of [1, 2, 5]) {
        const value = digit * 10 ** power;
        if (value >= low * 0.999 && value <= high * 1.001) found.push(+value.toPrecision(3));
      }
    }
    if (found.length <= count && found.length > 1) return found;
    if (found.length > count) {
      const every = Math.ceil(found.length / count);
      return found.filter((_, index) => index % every === 0);
    }
  }
  const rough = (high - low) / Math.max(1, count);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(digit => digit * unit).find(size => size >= rough * 0.999);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step)
    found.push(+value.toPrecision(10));
  return found;
}

function segments(options, chosen, choose) {
  const box = element("div", { class: "seg", role: "group" });
  for (const [key, label] of options)
    box.append(element("button", {
      type: "button", "data-key": key, "aria-pressed": String(key === chosen),
      onclick: () => {
        for (const button of box.children)
          button.setAttribute("aria-pressed", String(button.dataset.key === key));
        choose(key);
      },
    }, label));
  return box;
}

function marker(series, x, y, size = 4) {
  const look = series.run ? { fill: "var(--card)", stroke: series.color, "stroke-width": 2 }
    : { fill: series.color, stroke: "var(--card)", "stroke-width": 1.5 };
  return element("circle", { cx: x, cy: y, r: size, ...look });
}

// Loads of the mixed traffic on the chosen axis: [{x, y, point}], all at once with x = Infinity.
function curve(series, value) {
  const rows = [];
  for (const point of series.points) {
    if (point.prompts !== MIX) continue;
    const x = state.axis === "concurrency" ? point.concurrency
      : point.level === BURST ? Infinity : point.x;
    const y = value(point);
    if (x !== null && y !== null && y !== undefined) rows.push({ x, y, point });
  }
  return rows.sort((a, b) => a.x - b.x);
}

const AXIS_TITLE = { rate: "requests per second", concurrency: "requests in flight" };

// A line chart into `box`. options: {curves: [{series, rows}], reference, log, zero, unit,
// xTitle, linear, marks: [{series, x, y, text}]}
function drawLines(box, options) {
  box.replaceChildren();
  const curves = options.curves.filter(item => item.rows.length);
  if (!curves.length) {
    box.append(element("div", { class: "empty" }, options.empty || "not measured in this run"));
    return;
  }
  const width = Math.max(box.clientWidth, 240);
  const height = options.height || (width > 700 ? 330 : 250);
  const rows = curves.flatMap(item => item.rows);
  const finite = [...new Set(rows.map(row => row.x).filter(Number.isFinite))].sort((a, b) => a - b);
  const burst = rows.some(row => !Number.isFinite(row.x));
  const values = rows.map(row => row.y).concat(options.reference ?? []);
  let low = Math.min(...values), high = Math.max(...values);
  const log = options.log && low > 0 && high / low > 8;
  if (log) { low /= 1.15; high *= 1.15; }
  else {
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    low = options.zero ? Math.min(0, low) : low - room;
    high = (options.top ?? high + room);
  }
  const yTicks = ticks(low, high, 6, log);
  const left = 14 + 7 * Math.max(...yTicks.map(value => (format(value) + (options.unit || "")).length));
  const right = 16, top = 10, bottom = 44, tail = burst ? Math.min(90, width * 0.16) : 0;
  const span = width - left - right - tail;
  const scale = options.linear ? value => value : Math.log;
  const first = scale(finite[0] ?? 1), last = scale(finite[finite.length - 1] ?? 1);
  const px = x => !Number.isFinite(x) ? width - right - 8
    : left + 8 + (span - 16) * (last > first ? (scale(x) - first) / (last - first) : 0.5);
  const ys = log ? Math.log : value => value;
  const py = y => top + (height - top - bottom) * (1 - (ys(y) - ys(low)) / (ys(high) - ys(low) || 1));
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": options.title || "" });

  for (const value of yTicks) {
    svg.append(element("line", { class: "gridline", x1: left, x2: width - right, y1: py(value), y2: py(value) }),
      element("text", { x: left - 8, y: py(value) + 4, "text-anchor": "end" },
        format(value) + (options.unit || "")));
  }
  svg.append(element("line", { class: "axis", x1: left, x2: width - right,
    y1: height - bottom, y2: height - bottom }));
  const labels = options.linear
    ? ticks(finite[0], finite[finite.length - 1], width / 50, false).filter(Number.isInteger) : finite;
  let taken = -Infinity;
  for (const x of labels) {
    const idle = state.axis === "rate" && !options.linear
      && rows.some(row => row.x === x && row.point?.level === IDLE);
    const text = idle ? "idle" : format(x);
    const half = text.length * 3.6 + 5;
    svg.append(element("line", { class: "axis", x1: px(x), x2: px(x), y1: height - bottom, y2: height - bottom + 4 }));
    if (px(x) - half < taken) continue;
    taken = px(x) + half;
    svg.append(element("text", { x: px(x), y: height - bottom + 17, "text-anchor": "middle" }, text));
  }
  if (burst) {
    const narrow = width < 460;
    svg.append(element("line", { class: "gridline", "stroke-dasharray": "2 4", x1: width - right - tail + 8,
      x2: width - right - tail + 8, y1: top, y2: height - bottom }));
    svg.append(element("text", { x: width - right + (narrow ? 4 : 6), y: height - bottom + 17, "text-anchor": "end" },
      narrow ? "burst" : "all at once"));
  }
  svg.append(element("text", { x: left + span / 2, y: height - 6, "text-anchor": "middle" },
    options.xTitle || AXIS_TITLE[state.axis]));
  if (options.reference !== undefined) {
    const y = py(options.reference);
    svg.append(element("line", { class: "one", "data-reference": options.reference, x1: left, x2: width - right, y1: y, y2: y }));
  }

  for (const { series, rows: points } of curves) {
    const dash = series.run ? "6 5" : null;
    const steady = points.filter(row => Number.isFinite(row.x));
    const path = steady.map((row, i) => `${i ? "L" : "M"}${px(row.x).toFixed(1)} ${py(row.y).toFixed(1)}`).join("");
    svg.append(element("path", { class: "line", d: path || "M0 0", stroke: series.color,
      "stroke-dasharray": dash, "data-series": series.id }));
    const end = points.find(row => !Number.isFinite(row.x));
    if (end && steady.length) {
      const from = steady[steady.length - 1];
      svg.append(element("path", { class: "line", d: `M${px(from.x)} ${py(from.y)}L${px(end.x)} ${py(end.y)}`,
        stroke: series.color, "stroke-dasharray": "1.5 5", opacity: 0.8 }));
    }
  }
  for (const { series, rows: points } of curves)
    for (const row of points) svg.append(marker(series, px(row.x), py(row.y)));
  const placed = [];
  for (const mark of options.marks || []) {
    const x = px(mark.x), y = py(mark.y);
    let level = 0;
    while (placed.some(other => Math.abs(other.x - x) < 78 && other.level === level)) level++;
    placed.push({ x, level });
    const base = height - bottom - 8 - level * 16;
    svg.append(element("line", { x1: x, x2: x, y1: y, y2: base - 10, stroke: mark.series.color,
      "stroke-dasharray": "2 3" }));
    svg.append(element("polygon", { class: "crossover", points: `${x},${y - 7} ${x + 7},${y} ${x},${y + 7} ${x - 7},${y}`,
      fill: "var(--card)", stroke: mark.series.color, "stroke-width": 2.25 }));
    const start = x > width - 130;
    svg.append(element("text", { class: "strong", x: x + (start ? -6 : 6), y: base,
      "text-anchor": start ? "end" : "start", style: `fill: ${mark.series.color}` }, mark.text));
  }

  // Nearest load under the pointer, all its values in a box.
  const guide = element("line", { class: "guide", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(guide);
  const tip = element("div", { class: "tip", hidden: "" });
  const stops = [...finite, ...(burst ? [Infinity] : [])];
  const leave = () => { tip.hidden = true; guide.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", event => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const x = stops.reduce((best, stop) => Math.abs(px(stop) - at) < Math.abs(px(best) - at) ? stop : best);
    guide.setAttribute("x1", px(x)); guide.setAttribute("x2", px(x));
    guide.setAttribute("visibility", "visible");
    const here = curves.map(item => [item.series, item.rows.find(row => row.x === x)]).filter(pair => pair[1]);
    const label = options.linear ? `${options.xTitle} ${x}` : here[0][1].point.label;
    tip.replaceChildren(element("b", {}, label), ...here.map(([series, row]) => element("div", {},
      element("span", {}, element("i", { style: `background: ${series.color}` }), series.label),
      element("span", {}, format(row.y) + (options.unit || "")))));
    tip.hidden = false;
    const room = box.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, px(x) + (px(x) > width / 2 ? -tip.offsetWidth - 12 : 12)))}px`;
    tip.style.top = "12px";
  });
  box.append(svg, tip);
}

// Panels

function panel(title, why, { wide = false, choices = [], draw, key = null }) {
  const choice = choices.map(group => group[0][0]);
  const box = element("div", { class: "chart" });
  const redraw = () => draw(box, ...choice);
  const controls = choices.filter(group => group.length > 1).map(group => segments(group, group[0][0], picked => {
    choice[choices.indexOf(group)] = picked;
    redraw();
  }));
  document.getElementById("charts").append(element("article", { class: wide ? "panel wide" : "panel", "data-panel": title },
    element("div", { class: "top" }, element("h2", {}, title), ...controls),
    element("p", { class: "why" }, why), box, key));
  charts.push(redraw);
}

const facts = RUNS[0].plan;
const anySpec = RUNS.some(run => run.points.some(point => point.spec));
const lines = value => visible().map(series => ({ series, rows: curve(series, value) }));

if (hasRates || hasCounts || RUNS.some(run => run.points.some(p => p.prompts === MIX))) {
  panel("Speed-up against load",
    "How many times better than plain vLLM under the same load. Above the dashed line speculation pays; a diamond marks where it stops.", {
    wide: true,
    choices: [[["p50_e2el_ms", "end to end"], ["p50_tpot_ms", "per token"], ["output_throughput", "throughput"]]],
    draw: (box, metric) => {
      const curves = lines(point => point.speed_up[metric]).filter(item => item.series.name !== "plain");
      const marks = state.axis !== "rate" || metric !== "p50_e2el_ms" ? [] : curves
        .filter(item => item.series.crossover?.rate)
        .map(({ series }) => ({ series, x: series.crossover.rate, y: 1, text: `${format(series.crossover.rate)}/s` }));
      drawLines(box, { curves, marks, reference: 1, log: true, unit: "×", title: "Speed-up against load",
        empty: "no server besides plain vLLM was measured" });
    },
  });
  panel("Latency against load", "What a request waits for, in milliseconds. Lower is better.", {
    choices: [[["e2el", "end to end"], ["tpot", "per token"], ["ttft", "first token"]],
      [["p50", "median"], ["p90", "p90"], ["p99", "p99"]]],
    draw: (box, metric, percent) => drawLines(box, { curves: lines(point => point[`${percent}_${metric}_ms`]),
      log: true, unit: "", title: "Latency against load" }),
  });
  const served = [["output_throughput", "tokens/s"], ["request_throughput", "requests/s"]];
  if (facts.goodput.length) served.push(["request_goodput", "good requests/s"]);
  panel("Throughput against load", facts.goodput.length
    ? `What is served. Good requests meet ${facts.goodput.map(slo => slo.replace(":", " ≤ ") + " ms").join(", ")}.`
    : "What is served. Below saturation everyone serves what arrives.", {
    choices: [served],
    draw: (box, metric) => drawLines(box, { curves: lines(point => point[metric]), zero: true, title: "Throughput against load" }),
  });
}
if (anySpec) {
  panel("Draft size against load",
    "Nodes drafted per request and step, plain steps counted as none; mean tokens a drafted step gains.", {
    choices: [[["nodes", "nodes"], ["length", "acceptance length"]]],
    draw: (box, metric) => drawLines(box, {
      curves: lines(point => !point.spec ? null : metric === "length" ? point.spec.mean_acceptance_length
        : point.spec.nodes_per_request_step ?? point.spec.nodes_per_draft),
      zero: metric === "nodes", title: "Draft size against load" }),
  });
  const sharing = SERIES.filter(series => series.points.some(point => point.spec?.share));
  if (sharing.length)
    panel("Where time goes", "Share of wall time by part of a step.", {
      choices: [sharing.map(series => [series.id, series.label])],
      draw: drawShares,
      key: element("div", { class: "key" }, ...PHASES.map(([, color, label]) =>
        element("span", {}, element("i", { style: `background: var(${color})` }), label))),
    });
  const sets = [...new Set(RUNS.flatMap(run => run.points.filter(p => p.spec?.drafts).map(p => p.prompts)))]
    .sort((a, b) => (a !== MIX) - (b !== MIX));
  panel("Acceptance by depth", "Share of drafts accepted to this depth or deeper.", {
    choices: [sets.map(name => [name, name === MIX ? "mix" : name])],
    draw: (box, name) => drawLines(box, {
      curves: visible().map(series => {
        const point = series.points.find(p => p.prompts === name && p.spec?.acceptance_by_depth?.length);
        return { series, rows: (point?.spec.acceptance_by_depth || []).map((y, i) => ({ x: i + 1, y: 100 * y })) };
      }),
      linear: true, zero: true, unit: "%", xTitle: "depth", title: "Acceptance by depth" }),
  });
  if (sets.some(name => name !== MIX))
    panel("Acceptance by data set", "Mean tokens per request and step: 1 + accepted / drafts.", {
      draw: box => drawBars(box, sets.filter(name => name !== MIX)),
    });
}

function drawShares(box, id) {
  box.replaceChildren();
  const series = SERIES.find(item => item.id === id);
  const rows = curve(series, point => point.spec?.share ? 1 : null);
  if (!rows.length) {
    box.append(element("div", { class: "empty" }, "not measured on this axis"));
    return;
  }
  const width = Math.max(box.clientWidth, 240), height = 28 * rows.length + 8, left = 84;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Where time goes" });
  rows.forEach(({ point }, index) => {
    const y = 4 + 28 * index;
    const share = { ...point.spec.share };
    share.rest = Math.max(0, 1 - share.draft - share.verify - share.compact);
    let x = left;
    svg.append(element("text", { x: left - 8, y: y + 15, "text-anchor": "end" },
      state.axis === "rate" && point.level === IDLE ? "idle" : point.label));
    for (const [phase, color] of PHASES) {
      const size = (width - left - 4) * share[phase];
      const bar = element("rect", { x, y, width: Math.max(0, size - 1.5), height: 21, rx: 3, style: `fill: var(${color})` });
      bar.append(element("title", {}, `${phase}: ${(100 * share[phase]).toFixed(1)} %`));
      svg.append(bar);
      if (size > 38)
        svg.append(element("text", { x: x + size / 2, y: y + 15, "text-anchor": "middle",
          style: phase === "rest" ? "" : "fill: var(--card); font-weight: 600" }, `${Math.round(100 * share[phase])}%`));
      x += size;
    }
  });
  box.append(svg);
}

function drawBars(box, sets) {
  box.replaceChildren();
  const bars = sets.map(name => [name, visible().map(series => [series,
    series.points.find(p => p.prompts === name)?.spec?.mean_acceptance_length]).filter(pair => pair[1])]);
  const high = Math.max(1, ...bars.flatMap(([, found]) => found.map(pair => pair[1])));
  const width = Math.max(box.clientWidth, 240), left = 96, size = 15;
  const heights = bars.map(([, found]) => found.length * (size + 3) + 14);
  const svg = element("svg", { viewBox: `0 0 ${width} ${heights.reduce((a, b) => a + b, 4)}`,
    height: heights.reduce((a, b) => a + b, 4), role: "img", "aria-label": "Acceptance by data set" });
  let y = 4;
  bars.forEach(([name, found], index) => {
    svg.append(element("text", { x: left - 8, y: y + (heights[index] - 14) / 2 + 4, "text-anchor": "end" }, name));
    found.forEach(([series, value], place) => {
      const length = (width - left - 44) * value / high;
      svg.append(element("rect", { x: left, y: y + place * (size + 3), width: length, height: size, rx: 3,
        style: `fill: ${series.color}`, opacity: series.run ? 0.55 : 1 }));
      svg.append(element("text", { x: left + length + 6, y: y + place * (size + 3) + 12 }, value.toFixed(2)));
    });
    y += heights[index];
  });
  box.append(svg);
}

// Legend, axis, theme

const legend = document.getElementById("legend");
for (const series of SERIES) {
  const sample = element("svg", { width: 22, height: 10, "aria-hidden": "true" },
    element("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: series.color, "stroke-width": 2.5,
      "stroke-dasharray": series.run ? "4 3" : null }), marker(series, 11, 5, 3.5));
  legend.append(element("button", { type: "button", class: "chip", "aria-pressed": "true", "data-series": series.id,
    onclick: event => {
      const off = !state.hidden.delete(series.id);
      if (off) state.hidden.add(series.id);
      event.currentTarget.setAttribute("aria-pressed", String(!off));
      drawAll();
    } }, sample, series.label));
}
if (hasRates && hasCounts)
  legend.append(element("span", { class: "axis-switch" }, segments(
    [["rate", "by request rate"], ["concurrency", "by requests in flight"]], state.axis,
    key => { state.axis = key; drawAll(); })));

const button = document.getElementById("theme");
button.hidden = false;
button.addEventListener("click", () => {
  const order = ["auto", "light", "dark"];
  const next = order[(order.indexOf(document.documentElement.dataset.theme || "auto") + 1) % 3];
  document.documentElement.dataset.theme = next;
  button.textContent = `theme: ${next}`;
});

function drawAll() { for (const redraw of charts) redraw(); }
let drawnWidth = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth !== drawnWidth) {
    drawnWidth = document.body.clientWidth;
    drawAll();
  }
}).observe(document.body);
drawAll();
