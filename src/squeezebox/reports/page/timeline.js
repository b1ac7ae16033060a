"use strict";
(() => {
const figures = JSON.parse(document.getElementById("figures").textContent);
const names = figures.names;
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
const colour = (name) => `var(--${name.replaceAll(" ", "-")})`;

function human(nbytes) {
  let unit = 0;
  while (Math.abs(nbytes) >= 1024 && unit < 3) { nbytes /= 1024; unit += 1; }
  return `${unit ? nbytes.toFixed(2) : Math.round(nbytes)} ${["B", "KiB", "MiB", "GiB"][unit]}`;
}
const clock = (seconds) => seconds < 1 ? `${(seconds * 1e3).toFixed(2)} ms` : `${seconds.toFixed(3)} s`;
const power = (value) => value ? value.toExponential(1) : "0";
const module_ = (name) => name || "(model)";

function draw(parent, tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function tip(chart) {
  const box = document.createElement("div");
  box.className = "tip";
  box.hidden = true;
  chart.append(box);
  return {
    show(text, x, y) {
      box.textContent = text;
      box.hidden = false;
      const left = Math.min(x + 14, chart.clientWidth - box.offsetWidth - 4);
      box.style.left = `${Math.max(0, left)}px`;
      box.style.top = `${y + 14 + chart.scrollTop}px`;
    },
    hide() { box.hidden = true; },
  };
}

const speak = (text) => { byId("spoken").textContent = text; };

function legend(id, labels) {
  for (const label of labels) {
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.background = colour(label);
    item.append(swatch, label);
    byId(id).append(item);
  }
}

function niceStep(range, count) {
  const rough = range / count, unit = 2 ** Math.floor(Math.log2(rough));
  return rough > 1.5 * unit ? 2 * unit : unit;
}

// --- memory over the step: a stack of steps, each sample lasting until the next
function memory() {
  const chart = byId("memory"), samples = figures.samples, width = 1000, height = 340;
  const left = 78, right = 12, top = 26, bottom = 26, end = figures.seconds;
  const totals = samples.map((sample) => sample.nbytes.reduce((sum, each) => sum + each, 0));
  const most = Math.max(...totals, figures.budget_bytes || 0) * 1.06 || 1;
  const y = (nbytes) => top + (height - top - bottom) * (1 - nbytes / most);
  const svg = draw(chart, "svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const hover = tip(chart);
  let [from, to] = [0, end], at = totals.indexOf(Math.max(...totals)), dragged = null;
  const peak = at;
  const x = (seconds) => left + (width - left - right) * (seconds - from) / (to - from);
  const until = (number) => number + 1 < samples.length ? samples[number + 1].seconds : end;
  const clip = (value) => Math.min(width - right, Math.max(left, value));

  function edge(levels, numbers) {
    return numbers.map((number) =>
      `${clip(x(samples[number].seconds)).toFixed(2)},${y(levels[number]).toFixed(3)} ` +
      `${clip(x(until(number))).toFixed(2)},${y(levels[number]).toFixed(3)}`);
  }
  function phases() {
    let start = 0;
    samples.forEach((sample, number) => {
      if (number + 1 < samples.length && samples[number + 1].phase === sample.phase) return;
      const [x0, x1] = [clip(x(samples[start].seconds)), clip(x(until(number)))];
      start = number + 1;
      if (x1 - x0 < 1) return;
      draw(svg, "rect", { class: "phase", x: x0, y: 2, width: x1 - x0 - 1, height: 18 });
      if (x1 - x0 > 8 * names[sample.phase].length) draw(svg, "text", { x: x0 + 5, y: 15 }, names[sample.phase]);
    });
  }
  function render() {
    svg.replaceChildren();
    phases();
    const step = niceStep(most, 5);
    for (let nbytes = 0; nbytes <= most; nbytes += step) {
      draw(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y(nbytes), y2: y(nbytes) });
      draw(svg, "text", { class: "soft tick", x: left - 6, y: y(nbytes) + 4, "text-anchor": "end", "data-nbytes": nbytes }, human(nbytes));
    }
    for (let part = 0; part <= 4; part += 1) {
      const seconds = from + (to - from) * part / 4;
      draw(svg, "text", { class: "soft", x: x(seconds), y: height - 8, "text-anchor": part ? part < 4 ? "middle" : "end" : "start" }, clock(seconds));
    }
    const shown = samples.map((_, number) => number).filter((number) => until(number) >= from && samples[number].seconds <= to);
    let below = samples.map(() => 0);
    figures.kinds.forEach((kind, column) => {
      const above = below.map((nbytes, number) => nbytes + samples[number].nbytes[column]);
      const outline = [...edge(above, shown), ...edge(below, shown).map((pair) => pair.split(" ").reverse().join(" ")).reverse()];
      draw(svg, "path", { d: `M${outline.join(" L")}Z`, style: `fill:${colour(kind)}`, "data-kind": kind });
      below = above;
    });
    if (figures.budget_bytes) {
      const level = y(figures.budget_bytes);
      draw(svg, "line", { class: "limit", id: "budget", x1: left, x2: width - right, y1: level, y2: level });
      draw(svg, "text", { x: left + 6, y: level - 5 }, `budget ${human(figures.budget_bytes)}`);
    }
    if (samples[peak].seconds >= from && samples[peak].seconds <= to) {
      const [px, py] = [x(samples[peak].seconds), y(totals[peak])], before = px > width / 2;
      const room = before ? px - left : width - right - px;
      draw(svg, "circle", { class: "peak", id: "peak", cx: px, cy: py, r: 5 });
      draw(svg, "text", { x: px + (before ? -10 : 10), y: py - 6, "text-anchor": before ? "end" : "start" },
        7 * figures.owner.length < room ? figures.owner : human(totals[peak]));
    }
    if (!hover.hidden && x(samples[at].seconds) >= left) {
      const cursor = clip(x(samples[at].seconds));
      draw(svg, "line", { class: "cursor", x1: cursor, x2: cursor, y1: top, y2: height - bottom });
    }
    if (dragged) draw(svg, "rect", { class: "drag", x: Math.min(...dragged), width: Math.abs(dragged[1] - dragged[0]), y: top, height: height - top - bottom });
  }
  function describe() {
    const sample = samples[at];
    const parts = figures.kinds.map((kind, column) => [kind, sample.nbytes[column]]).filter(([, nbytes]) => nbytes);
    return [`${clock(sample.seconds)}  ${human(totals[at])}`, `${names[sample.phase]}  ${module_(names[sample.module])}  ${names[sample.operator]}`,
      ...parts.reverse().map(([kind, nbytes]) => `${human(nbytes).padStart(11)}  ${kind}`)].join("\n");
  }
  function show(px, py, spoken) {
    hover.hidden = false;
    render();
    hover.show(describe(), px, py);
    if (spoken) speak(describe());
  }
  const scale = () => svg.getBoundingClientRect().width / width;
  const inside = (event) => (event.clientX - svg.getBoundingClientRect().left) / scale();
  const secondsAt = (px) => from + (to - from) * (clip(px) - left) / (width - left - right);
  function last(seconds) {
    let found = 0;
    samples.forEach((sample, number) => { if (sample.seconds <= seconds) found = number; });
    return found;
  }
  function zoom(low, high) {
    const least = end / 2000;
    if (high - low < least) { const middle = (low + high) / 2; low = middle - least / 2; high = middle + least / 2; }
    from = Math.max(0, low);
    to = Math.min(end, high);
    chart.dataset.from = from;
    chart.dataset.to = to;
    render();
  }
  function around(factor) {
    const seconds = samples[at].seconds, middle = seconds >= from && seconds <= to ? seconds : (from + to) / 2;
    zoom(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }
  function move(by) {
    at = Math.min(samples.length - 1, Math.max(0, at + by));
    const seconds = samples[at].seconds, span = to - from;
    if (seconds < from || seconds > to) zoom(Math.min(Math.max(0, seconds - span / 2), end - span), Math.max(span, Math.min(end, seconds + span / 2)));
    show(x(seconds) * scale(), y(totals[at]) * scale(), true);
  }
  const keys = {
    ArrowLeft: () => move(-1), ArrowRight: () => move(1), PageUp: () => move(-20), PageDown: () => move(20),
    Home: () => move(-samples.length), End: () => move(samples.length), "+": () => around(0.5), "=": () => around(0.5),
    "-": () => around(2), "0": () => zoom(0, end), Escape: () => zoom(0, end), p: () => move(peak - at), P: () => move(peak - at),
  };
  chart.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  svg.addEventListener("pointermove", (event) => {
    at = last(secondsAt(inside(event)));
    if (dragged) dragged[1] = clip(inside(event));
    show(event.clientX - chart.getBoundingClientRect().left, event.clientY - chart.getBoundingClientRect().top);
  });
  svg.addEventListener("pointerdown", (event) => { dragged = [clip(inside(event)), clip(inside(event))]; });
  svg.addEventListener("pointerup", () => {
    const range = dragged && dragged.map(secondsAt).sort((a, b) => a - b);
    const wide = dragged && Math.abs(dragged[1] - dragged[0]) > 4;
    dragged = null;
    wide ? zoom(...range) : render();
  });
  svg.addEventListener("dblclick", () => zoom(0, end));
  const leave = () => { hover.hide(); hover.hidden = true; dragged = null; render(); };
  svg.addEventListener("pointerleave", leave);
  chart.addEventListener("blur", leave);
  byId("in").addEventListener("click", () => around(0.5));
  byId("out").addEventListener("click", () => around(2));
  byId("whole").addEventListener("click", () => zoom(0, end));
  hover.hidden = true;
  legend("kinds", figures.kinds);
  zoom(0, end);
}

// --- layers: outlined before, filled after
function layers() {
  const chart = byId("layers"), hover = tip(chart), width = 1000, label = 300, notes = 190, line = 26;
  const most = Math.max(1, ...figures.layers.map((layer) => Math.max(layer.saved, layer.held)));
  const length = (nbytes) => nbytes / most * (width - label - notes);
  const svg = draw(chart, "svg", { viewBox: `0 0 ${width} ${line * figures.layers.length + 2}`, role: "list" });
  const text = (layer) => [module_(layer.module), `${human(layer.saved)} saved, ${human(layer.held)} held`,
    layer.bits === null ? "as they are" : `${layer.bits.toFixed(2)} bits an element, noise ${power(layer.noise)}`,
    ...layer.parts.map((part) => `${part.action}: ${human(part.saved)} -> ${human(part.held)}`)].join("\n");
  function row(layer, number) {
    const group = draw(svg, "g", { class: "row", tabindex: number ? -1 : 0, role: "listitem", transform: `translate(0 ${number * line})`,
      "aria-label": text(layer), "data-module": layer.module });
    draw(group, "rect", { class: "hit", x: 0, y: 0, width, height: line - 2 });
    const name = module_(layer.module);
    draw(group, "text", { x: label - 8, y: 17, "text-anchor": "end" }, name.length > 40 ? `…${name.slice(-39)}` : name);
    draw(group, "rect", { class: "before", x: label, y: 4, width: Math.max(0.5, length(layer.saved)), height: 16 });
    let [x, start] = [label, label];
    for (const part of layer.parts) {  // pale: what it was, so that what leaves nothing behind has a colour too
      draw(group, "rect", { class: "gone", x: start, y: 5, width: length(part.saved), height: 14, style: `fill:${colour(part.action)}` });
      start += length(part.saved);
    }
    for (const part of layer.parts) {
      draw(group, "rect", { class: "after", x, y: 6, width: Math.max(1, length(part.held)), height: 12, style: `fill:${colour(part.action)}`,
        "data-action": part.action, "data-width": length(part.held) });
      x += Math.max(1, length(part.held));
    }
    draw(group, "text", { class: "soft", x: width - notes + 10, y: 17 }, layer.bits === null ? "as they are" : `${layer.bits.toFixed(1)} bits   noise ${power(layer.noise)}`);
    const show = () => { const box = group.getBoundingClientRect(), outer = chart.getBoundingClientRect();
      hover.show(text(layer), box.width * (label - 100) / width, box.top - outer.top); };
    group.addEventListener("pointerenter", show);
    group.addEventListener("focus", show);
    group.addEventListener("pointerleave", hover.hide);
    group.addEventListener("blur", hover.hide);
  }
  function render() {
    svg.replaceChildren();
    const key = byId("sort").value, sorted = [...figures.layers];
    if (key !== "order") sorted.sort((a, b) => b[key] - a[key]);
    sorted.forEach(row);
  }
  chart.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key], rows = [...svg.children];
    const next = rows[rows.indexOf(document.activeElement) + by];
    if (!by || !next) return;
    event.preventDefault();
    document.activeElement.setAttribute("tabindex", -1);
    next.setAttribute("tabindex", 0);
    next.focus();
  });
  byId("sort").addEventListener("change", render);
  legend("actions", figures.actions);
  render();
}

// --- bounds: a line for each tensor, on a logarithmic scale
function history() {
  const chart = byId("history"), { steps, tensors } = figures.history, width = 1000, height = 240;
  const values = tensors.flatMap((tensor) => tensor.bounds).filter((bound) => bound > 0);
  if (!values.length) { chart.textContent = "Nothing is lost: no tensor has an error bound."; chart.removeAttribute("tabindex"); byId("tensor").closest(".tools").remove(); return; }
  const low = Math.floor(Math.log10(Math.min(...values))), high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values))));
  const x = (number) => 78 + (steps.length > 1 ? 900 * number / (steps.length - 1) : 450);
  const y = (bound) => 10 + 200 * (high - Math.log10(bound)) / (high - low);
  const svg = draw(chart, "svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }), hover = tip(chart);
  for (let decade = low; decade <= high; decade += Math.max(1, Math.round((high - low) / 6))) {
    draw(svg, "line", { class: "grid", x1: 70, x2: width - 12, y1: y(10 ** decade), y2: y(10 ** decade) });
    draw(svg, "text", { class: "soft", x: 64, y: y(10 ** decade) + 4, "text-anchor": "end" }, `1e${decade}`);
  }
  steps.forEach((step, number) => {
    if (number % Math.ceil(steps.length / 12) === 0) draw(svg, "text", { class: "soft", x: x(number), y: height - 6, "text-anchor": "middle" }, step);
  });
  const select = byId("tensor");
  tensors.forEach((tensor, number) => {
    const points = tensor.bounds.map((bound, step) => [step, bound]).filter(([, bound]) => bound > 0);
    draw(svg, "polyline", { class: "line", points: points.map(([step, bound]) => `${x(step)},${y(bound)}`).join(" "), "data-key": tensor.key });
    for (const [step, bound] of points) draw(svg, "circle", { class: "dot", cx: x(step), cy: y(bound), r: 2, "data-tensor": number, "data-bound": bound });
    select.append(new Option(tensor.key, number));
  });
  const text = (tensor) => `${tensor.key}\n${tensor.bounds.map((bound, step) => `${steps[step]}: ${bound ? bound.toPrecision(3) : "-"}`).slice(-8).join("\n")}`;
  function choose(number) {
    select.value = number;
    for (const element of svg.querySelectorAll(".on")) element.classList.remove("on");
    svg.querySelectorAll("polyline")[number].classList.add("on");
    for (const element of svg.querySelectorAll(`[data-tensor="${number}"]`)) element.classList.add("on");
  }
  function show(number, px, py) { choose(number); hover.show(text(tensors[number]), px, py); }
  select.addEventListener("change", () => choose(Number(select.value)));
  chart.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    show((Number(select.value) + by + tensors.length) % tensors.length, 80, 20);
    speak(text(tensors[Number(select.value)]));
  });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), px = (event.clientX - box.left) * width / box.width, py = (event.clientY - box.top) * width / box.width;
    let nearest = null, least = 400;
    for (const dot of svg.querySelectorAll("circle")) {
      const far = (dot.getAttribute("cx") - px) ** 2 + (dot.getAttribute("cy") - py) ** 2;
      if (far < least) [nearest, least] = [dot, far];
    }
    nearest ? show(Number(nearest.dataset.tensor), event.clientX - box.left, event.clientY - box.top) : hover.hide();
  });
  svg.addEventListener("pointerleave", hover.hide);
  chart.addEventListener("blur", hover.hide);
  choose(0);
}

// --- predicted and measured, each pair on its own scale
function forecasts() {
  const chart = byId("forecasts"), pairs = figures.forecasts, width = 1000, line = 46;
  if (!pairs.length) { chart.textContent = "There is no plan, and no noise has been measured: nothing was predicted."; return; }
  const svg = draw(chart, "svg", { viewBox: `0 0 ${width} ${line * pairs.length}`, "aria-hidden": "true" });
  const value = (pair, which) => pair.unit === "bytes" ? human(pair[which]) : pair.unit === "seconds" ? clock(pair[which]) : power(pair[which]);
  pairs.forEach((pair, number) => {
    const most = Math.max(pair.estimated, pair.measured) || 1;
    draw(svg, "text", { x: 0, y: number * line + 24 }, pair.name);
    ["estimated", "measured"].forEach((which, position) => {
      const y = number * line + 4 + 18 * position;
      draw(svg, "rect", { x: 150, y, width: 640 * pair[which] / most, height: 15, style: `fill:${colour(position ? "compressed" : "buffers")}`, "data-name": pair.name, "data-which": which });
      draw(svg, "text", { class: "soft", x: 800, y: y + 12 }, `${position ? "measured" : "predicted"} ${value(pair, which)}`);
    });
  });
}

function sortable(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((header, column) => {
    const button = document.createElement("button");
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const down = header.getAttribute("aria-sort") !== "descending", number = !header.classList.contains("text");
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => { const cell = row.cells[column]; return number ? Number(cell.dataset.v ?? cell.textContent) : cell.textContent; };
      const rows = [...body.rows].sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (down ? -1 : 1));
      body.append(...rows);
    });
  });
}

for (const tools of document.querySelectorAll(".tools")) tools.hidden = false;
memory();
layers();
history();
forecasts();
document.querySelectorAll("table").forEach(sortable);
document.body.dataset.ready = "yes";
})();
