"use strict";

// Draws the element `data` (see paddle_vl/report/page.py) as panels, and listens to the reader.

const data = JSON.parse(document.getElementById("data").textContent);
for (const curve of data.panels.flatMap((panel) => panel.curves)) curve.steps = data.steps[curve.steps];
const several = data.runs.length > 1;
const MARGIN = { left: 62, right: 20, top: 10, bottom: 38 };
const DASHES = ["", "7 4", "2 3", "9 3 2 3", "4 2"];
const state = { hiddenRuns: new Set(), smoothing: 0, axis: "step", range: null };
const tip = Object.assign(document.createElement("div"), { id: "tip" });

const escaped = (text) =>
  String(text).replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

function made(tag, className, html = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.innerHTML = html;
  return element;
}

// Numbers ---------------------------------------------------------------------------------------

function shown(value, digits = 4) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15 || size < 1e-3) return value.toExponential(Math.max(digits - 2, 1)).replace(/\.?0+e/, "e");
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

function shownTick(value) {
  const size = Math.abs(value);
  for (const [factor, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= factor) return Number((value / (sign === "k" ? 1e3 : factor)).toPrecision(6)) + sign;
  }
  return shown(value, 6);
}

function linearTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((one) => one >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    ticks.push(Number((i * step).toPrecision(12)));
  }
  return ticks;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const factors = decades > 4 ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 3, 5, 7];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of factors) {
      const tick = Number((factor * 10 ** power).toPrecision(6));
      if (tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9)) ticks.push(tick);
    }
  }
  return ticks.length > 1 ? ticks : linearTicks(low, high, 4);
}

// Curves ----------------------------------------------------------------------------------------

/** A function from a run's steps to the chosen horizontal quantity, linear between its lines. */
function horizontal(run) {
  if (state.axis === "step") return (step) => step;
  const curves = data.panels.flatMap((panel) => panel.curves);
  const { steps, values } = curves.find((one) => one.run === run && one.key === state.axis);
  const known = steps.map((_, i) => i).filter((i) => values[i] !== null);
  const at = known.map((i) => steps[i]);
  return (step) => {
    let i = nearestIndex(at, step);
    if (at[i] > step || i === at.length - 1) i = Math.max(i - 1, 0);
    const next = Math.min(i + 1, at.length - 1);
    const [low, high] = [values[known[i]], values[known[next]]];
    return next === i ? low : low + ((step - at[i]) / (at[next] - at[i])) * (high - low);
  };
}

function nearestIndex(sorted, value) {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle;
    else high = middle;
  }
  return Math.abs(sorted[high] - value) < Math.abs(sorted[low] - value) ? high : low;
}

/** Points of a curve with `x`, the value, and its exponential mean, unbiased at the beginning. */
function pointsOf(curve, toX) {
  const weight = curve.noisy ? state.smoothing : 0;
  const starts = new Set(curve.breaks);
  let mean = 0;
  let total = 0;
  let isCut = true;
  const points = [];
  curve.values.forEach((value, i) => {
    isCut = isCut || starts.has(i);
    if (value === null) {
      isCut = true;
      return;
    }
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    points.push({ step: curve.steps[i], x: toX(curve.steps[i]), value, smooth: mean / total, isCut });
    isCut = false;
  });
  return points;
}

/** The points of a range and one on either side; not more than a screen can show. */
function inRange(points, [low, high], columns) {
  let first = points.findIndex((point) => point.x >= low);
  if (first < 0) first = points.length;
  let last = points.length - 1;
  while (last >= 0 && points[last].x > high) last--;
  const kept = points.slice(Math.max(first - 1, 0), last + 2);
  if (kept.length <= 4 * columns) return kept;
  const thinned = [];
  const width = (high - low) / columns || 1;
  for (let i = 0; i < kept.length; ) {
    const column = Math.floor((kept[i].x - low) / width);
    let j = i;
    const own = new Set([i]);
    let [least, most] = [i, i];
    for (; j < kept.length && Math.floor((kept[j].x - low) / width) === column; j++) {
      if (kept[j].value < kept[least].value) least = j;
      if (kept[j].value > kept[most].value) most = j;
      if (kept[j].isCut) own.add(j);
    }
    for (const index of [least, most, j - 1]) own.add(index);
    thinned.push(...[...own].sort((a, b) => a - b).map((index) => kept[index]));
    i = j;
  }
  return thinned;
}

function pathOf(points, x, y, name) {
  let text = "";
  points.forEach((point, i) => {
    const isAlone = point.isCut && (i + 1 === points.length || points[i + 1].isCut);
    const place = `${x(point.x).toFixed(1)} ${y(point[name]).toFixed(1)}`;
    // A point without neighbours is a dot: a line of no length with round ends.
    text += (point.isCut || i === 0 ? "M" : "L") + place + (isAlone ? "h0.01" : "");
  });
  return text;
}

/** Between the least and the most of one quantity, at the steps that both have. */
function bandOf(low, high, x, y) {
  const upper = new Map(high.map((point) => [point.step, point]));
  const both = low.filter((point) => upper.has(point.step));
  const parts = [];
  for (const point of both) {
    if (point.isCut || !parts.length) parts.push([]);
    parts.at(-1).push(point);
  }
  const at = (point) => `${x(point.x).toFixed(1)} ${y(point.smooth).toFixed(1)}`;
  return parts
    .map((part) => {
      const back = part.map((point) => upper.get(point.step)).reverse();
      return `M${[...part, ...back].map(at).join("L")}Z`;
    })
    .join("");
}

// Panels ----------------------------------------------------------------------------------------

class PanelView {
  constructor(panel, place) {
    this.panel = panel;
    this.place = place;
    this.isLog = panel.log;
    this.isLarge = panel.section === data.panels[0].section;
    this.height = this.isLarge ? 320 : 240;
    this.hiddenKeys = new Set();
    this.keys = [...new Map(panel.curves.map((one) => [one.key, one.label])).entries()];
    this.canBeLog = panel.curves.some((one) => one.values.some((value) => value > 0));
    this.element = made("figure", "", this.frame());
    this.element.dataset.panel = panel.name;
    this.svg = this.element.querySelector("svg");
    this.scaleButton = this.element.querySelector("button.scale");
    this.scaleButton.disabled = !this.canBeLog;
    this.scaleButton.addEventListener("click", () => this.setLog(!this.isLog));
    this.element.querySelectorAll(".keys button").forEach((button) =>
      button.addEventListener("click", () => {
        const key = this.keys[button.dataset.index][0];
        if (!this.hiddenKeys.delete(key)) this.hiddenKeys.add(key);
        button.setAttribute("aria-pressed", String(!this.hiddenKeys.has(key)));
        this.draw();
      }),
    );
    this.listen();
  }

  frame() {
    const { title } = this.panel;
    const keys = this.keys.map(([key, label], i) => {
      const curve = this.panel.curves.find((one) => one.key === key);
      const mark = curve.eval ? '<circle cx="13" cy="5" r="3" fill="currentColor"/>' : "";
      const line = `<line x1="1" x2="25" y1="5" y2="5" stroke="currentColor" stroke-width="${isEdge(curve) ? 0.9 : 1.8}" stroke-dasharray="${this.dash(curve)}"/>`;
      const colour = several ? "var(--muted)" : this.colour(curve);
      return `<button class="series" data-index="${i}" aria-pressed="true" title="${escaped(key)}"><svg viewBox="0 0 26 10" style="color: ${colour}">${line}${mark}</svg>${escaped(label || title)}</button>`;
    });
    return `<figcaption><b>${escaped(title)}</b><button class="scale interactive">log</button></figcaption><svg role="img" aria-label="${escaped(title)}"></svg><div class="keys">${keys.length > 1 ? keys.join("") : ""}</div>`;
  }

  colour(curve) {
    return `var(--c${(several ? curve.run : curve.look) % 10})`;
  }

  dash(curve) {
    return several ? DASHES[curve.look % DASHES.length] : "";
  }

  setLog(isLog) {
    this.isLog = isLog && this.canBeLog;
    this.draw();
  }

  draw() {
    this.scaleButton.setAttribute("aria-pressed", String(this.isLog));
    const width = Math.max(this.element.clientWidth - 26, 320);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    const toX = data.runs.map((_, run) => horizontal(run));
    const isShown = (one) => !state.hiddenRuns.has(one.run) && !this.hiddenKeys.has(one.key);
    let numLeftOut = 0;
    this.drawn = this.panel.curves.filter(isShown).map((curve) => {
      const all = pointsOf(curve, toX[curve.run]);
      const points = this.isLog ? all.filter((point) => point.value > 0) : all;
      numLeftOut += all.length - points.length;
      return { curve, points };
    });
    const range = state.range || wholeRange();
    const inner = [MARGIN.left, width - MARGIN.right];
    const columns = inner[1] - inner[0];
    for (const one of this.drawn) one.near = inRange(one.points, range, columns);
    this.x = scale(range, inner, false);
    this.range = range;
    const [low, high] = this.valueRange(range);
    this.y = scale([low, high], [this.height - MARGIN.bottom, MARGIN.top], this.isLog);
    const clip = `clip${this.place}`;
    this.svg.innerHTML =
      `<defs><clipPath id="${clip}"><rect x="${inner[0] - 4}" y="0" width="${columns + 8}" height="${this.height - MARGIN.bottom + 3}"/></clipPath></defs>` +
      this.axes(range, [low, high], width) +
      `<g clip-path="url(#${clip})">${this.marks(toX, range)}${this.bands()}${this.lines()}</g>` +
      (numLeftOut ? `<text x="${inner[1]}" y="${MARGIN.top + 4}" text-anchor="end">${numLeftOut} values not above 0 left out</text>` : "") +
      '<g class="over"></g>';
  }

  valueRange([left, right]) {
    const values = this.drawn.flatMap(({ near }) =>
      near
        .filter((point) => point.x >= left && point.x <= right)
        .flatMap((point) => [point.value, point.smooth]),
    );
    if (!values.length) return this.isLog ? [0.1, 1] : [0, 1];
    let [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    if (this.isLog) {
      if (low === high) return [low / 1.5, high * 1.5];
      const room = (high / low) ** 0.04;
      return [low / room, high * room];
    }
    if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    // Amounts are compared by their height; what hardly varies is looked at closely.
    if (low > 0 && low < 0.6 * high) low = 0;
    const room = (high - low) * 0.05;
    return [low === 0 ? 0 : low - room, high + room];
  }

  axes([left, right], [low, high], width) {
    const [bottom, end] = [this.height - MARGIN.bottom, width - MARGIN.right];
    const ticksX = linearTicks(left, right, Math.max(4, Math.floor(width / 80)));
    const ticksY = this.isLog ? logTicks(low, high) : linearTicks(low, high, 5);
    const lines = ticksY.map((tick) => {
      const at = this.y(tick).toFixed(1);
      return `<line class="grid-line" x1="${MARGIN.left}" x2="${end}" y1="${at}" y2="${at}"/><text x="${MARGIN.left - 6}" y="${at}" dy="0.35em" text-anchor="end">${shownTick(tick)}</text>`;
    });
    lines.push(
      ...ticksX.map((tick) => {
        const at = this.x(tick).toFixed(1);
        return `<line class="axis" x1="${at}" x2="${at}" y1="${bottom}" y2="${bottom + 4}"/><text x="${at}" y="${bottom + 16}" text-anchor="middle">${shownTick(tick)}</text>`;
      }),
    );
    lines.push(`<line class="axis" x1="${MARGIN.left}" x2="${end}" y1="${bottom}" y2="${bottom}"/>`);
    const middle = (MARGIN.top + bottom) / 2;
    lines.push(`<text x="${(MARGIN.left + end) / 2}" y="${this.height - 4}" text-anchor="middle">${escaped(data.axes[state.axis] || state.axis)}</text>`);
    lines.push(`<text transform="rotate(-90)" x="${-middle}" y="11" text-anchor="middle">${escaped(this.unit())}</text>`);
    return lines.join("");
  }

  unit() {
    const { unit } = this.panel;
    return unit.length > 34 ? `${unit.slice(0, 33)}\u2026` : unit;
  }

  /** Where runs were resumed, and where updates were skipped: as a bar over the steps and a triangle. */
  marks(toX, [left, right]) {
    const bottom = this.height - MARGIN.bottom;
    return data.runs
      .map((run, i) => {
        if (state.hiddenRuns.has(i)) return "";
        const colour = several ? `var(--c${i % 10})` : "var(--muted)";
        const resumed = run.resumed.map((step) => {
          const at = this.x(toX[i](step)).toFixed(1);
          return `<line class="resumed" stroke="${colour}" x1="${at}" x2="${at}" y1="${MARGIN.top}" y2="${bottom}"><title>${escaped(run.name)} resumed at step ${step}</title></line>`;
        });
        const skipped = (this.panel.skipped ? run.skipped : []).map(([after, until, count]) => {
          const [from, to] = [Math.max(toX[i](after), left), Math.min(toX[i](until), right)].map(this.x);
          if (to < from) return "";
          return `<g class="skipped"><title>${escaped(run.name)}: ${skippedText(count, after, until)}</title><rect x="${from.toFixed(1)}" y="${bottom - 1.5}" width="${Math.max(to - from, 0.5).toFixed(1)}" height="3" stroke="none"/><path stroke="none" d="M${to.toFixed(1)} ${bottom - 10}l4 8h-8z"/></g>`;
        });
        return resumed.join("") + skipped.join("");
      })
      .join("");
  }

  bands() {
    return this.drawn
      .filter(({ curve }) => curve.statistic === "min")
      .map(({ curve, near }) => {
        const most = this.drawn.find(
          (one) => one.curve.run === curve.run && one.curve.statistic === "max" && one.curve.eval === curve.eval
            && one.curve.label.replace(/max$/, "") === curve.label.replace(/min$/, ""),
        );
        if (!most) return "";
        return `<path class="band${several ? " faint" : ""}" fill="${this.colour(curve)}" d="${bandOf(near, most.near, this.x, this.y)}"/>`;
      })
      .join("");
  }

  lines() {
    return this.drawn
      .map(({ curve, near }) => {
        const look = `stroke="${this.colour(curve)}" stroke-dasharray="${this.dash(curve)}"`;
        const edge = isEdge(curve) ? " edge" : "";
        const isSmooth = state.smoothing > 0 && curve.noisy;
        const raw = isSmooth ? `<path class="curve raw" stroke="${this.colour(curve)}" d="${pathOf(near, this.x, this.y, "value")}"/>` : "";
        const line = `<path class="curve${edge}" ${look} d="${pathOf(near, this.x, this.y, isSmooth ? "smooth" : "value")}"/>`;
        const isSparse = curve.eval || (near.length < 30 && !isSmooth);
        const dots = isSparse && !isEdge(curve) && near.length < 200
          ? near.map((point) => `<circle fill="${this.colour(curve)}" cx="${this.x(point.x).toFixed(1)}" cy="${this.y(point.value).toFixed(1)}" r="${curve.eval ? 3 : 1.8}"/>`).join("")
          : "";
        return raw + line + dots;
      })
      .join("");
  }

  // What the pointer does: over a panel it reads values, drawn across it chooses a range.

  listen() {
    let begin = null;
    const place = (event) => {
      const box = this.svg.getBoundingClientRect();
      const width = this.svg.viewBox.baseVal.width;
      const at = ((event.clientX - box.left) / box.width) * width;
      return Math.min(Math.max(at, MARGIN.left), width - MARGIN.right);
    };
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button === 0 && event.pointerType === "mouse") begin = place(event);
    });
    this.svg.addEventListener("pointermove", (event) => this.hover(place(event), begin, event));
    this.svg.addEventListener("pointerup", (event) => {
      const end = place(event);
      if (begin !== null && Math.abs(end - begin) > 6) {
        setRange([begin, end].sort((a, b) => a - b).map(this.x.inverse));
      }
      begin = null;
    });
    this.svg.addEventListener("pointerleave", () => {
      begin = null;
      tip.style.display = "none";
      this.svg.querySelector(".over").innerHTML = "";
    });
    this.svg.addEventListener("dblclick", () => setRange(null));
  }

  hover(at, begin, event) {
    const value = this.x.inverse(at);
    const found = this.drawn
      .filter(({ near }) => near.length)
      .map(({ curve, points }) => ({ curve, point: points[nearestIndex(points.map((one) => one.x), value)] }))
      .filter(({ point }) => point.x >= this.range[0] && point.x <= this.range[1]);
    const chosen = begin === null || Math.abs(at - begin) < 6
      ? ""
      : `<rect class="chosen" x="${Math.min(at, begin)}" y="${MARGIN.top}" width="${Math.abs(at - begin)}" height="${this.height - MARGIN.top - MARGIN.bottom}"/>`;
    const dots = found.map(
      ({ curve, point }) =>
        `<circle fill="${this.colour(curve)}" cx="${this.x(point.x)}" cy="${this.y(state.smoothing && curve.noisy ? point.smooth : point.value)}" r="3.5"/>`,
    );
    this.svg.querySelector(".over").innerHTML =
      `<line class="cross" x1="${at}" x2="${at}" y1="${MARGIN.top}" y2="${this.height - MARGIN.bottom}"/>${chosen}${dots.join("")}`;
    const rows = found.map(({ curve, point }) => {
      const name = [several ? data.runs[curve.run].name : "", curve.label].filter(Boolean).join(", ") || this.panel.title;
      const smooth = state.smoothing && curve.noisy ? ` (smoothed ${shown(point.smooth)})` : "";
      return `<tr><td><span class="chip" style="--own: ${this.colour(curve)}"></span>${escaped(name)}</td><td class="number">${shown(point.value, 6)}${smooth}</td><td>step ${point.step.toLocaleString("en-US")}</td></tr>`;
    });
    const steps = new Set(found.map(({ curve, point }) => `${curve.run} ${point.step}`));
    data.runs.forEach((run, i) => {
      for (const [after, until, count] of run.skipped) {
        if (steps.has(`${i} ${until}`)) {
          const who = several ? `${escaped(run.name)}: ` : "";
          rows.push(`<tr><td class="bad" colspan="3">${who}${skippedText(count, after, until)}</td></tr>`);
        }
      }
    });
    tip.innerHTML = `<table>${rows.join("")}</table>`;
    tip.style.display = rows.length ? "block" : "none";
    const { offsetWidth: width, offsetHeight: height } = tip;
    const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${Math.max(Math.min(event.clientY + 14, innerHeight - height - 8), 4)}px`;
  }
}

const isEdge = (curve) => ["min", "max"].includes(curve.statistic);

function skippedText(count, after, until) {
  return `${count} update${count > 1 ? "s" : ""} skipped after step ${after}, up to ${until}`;
}

function scale([from, to], [begin, end], isLog) {
  const [low, high] = isLog ? [Math.log10(from), Math.log10(to)] : [from, to];
  const slope = (end - begin) / (high - low || 1);
  const forward = (value) => begin + ((isLog ? Math.log10(value) : value) - low) * slope;
  forward.inverse = (place) => {
    const value = low + (place - begin) / slope;
    return isLog ? 10 ** value : value;
  };
  return forward;
}

/** From the first to the last line of all runs that are shown. */
function wholeRange() {
  let [low, high] = [Infinity, -Infinity];
  const ends = new Map();
  for (const { run, steps } of data.panels.flatMap((panel) => panel.curves)) {
    const [first, last] = ends.get(run) || [Infinity, -Infinity];
    ends.set(run, [Math.min(first, steps[0]), Math.max(last, steps.at(-1))]);
  }
  for (const [run, [first, last]] of ends) {
    if (state.hiddenRuns.has(run)) continue;
    const toX = horizontal(run);
    low = Math.min(low, toX(first));
    high = Math.max(high, toX(last));
  }
  if (low > high) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

// The page --------------------------------------------------------------------------------------

const views = data.panels.map((panel, i) => new PanelView(panel, i));
const redraw = () => views.forEach((view) => view.draw());

function setRange(range) {
  state.range = range;
  document.getElementById("reset").disabled = range === null;
  redraw();
}

function runButtons() {
  const group = made("div", "runs");
  data.runs.forEach((run, i) => {
    const button = made("button", "series", `<span class="chip" style="--own: var(--c${i % 10})"></span>${escaped(run.name)}`);
    button.title = "Show or hide this run; with Shift show it alone";
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", (event) => {
      const others = data.runs.map((_, j) => j).filter((j) => j !== i);
      if (event.shiftKey) state.hiddenRuns = new Set(others);
      else if (!state.hiddenRuns.delete(i)) state.hiddenRuns.add(i);
      group.querySelectorAll("button").forEach((one, j) =>
        one.setAttribute("aria-pressed", String(!state.hiddenRuns.has(j))),
      );
      redraw();
    });
    group.append(button);
  });
  return group;
}

function settings() {
  const axes = Object.entries({ step: "step", ...data.axes });
  const options = axes.map(([key, name]) => `<option value="${escaped(key)}">${escaped(name)}</option>`);
  const group = made(
    "div",
    "interactive",
    `<label>smoothing <input type="range" id="smoothing" min="0" max="0.99" step="0.01" value="0"><output>0.00</output></label>` +
      `<label>over <select id="axis">${options.join("")}</select></label>` +
      `<button id="log" class="scale">log losses</button><button id="reset" disabled>whole range</button><button id="theme">light / dark</button>` +
      `<span class="note">Drag across a panel to look closer, double-click to go back.</span>`,
  );
  const one = (selector) => group.querySelector(selector);
  one("#smoothing").addEventListener("input", (event) => {
    state.smoothing = Number(event.target.value);
    one("output").textContent = state.smoothing.toFixed(2);
    redraw();
  });
  one("#axis").addEventListener("change", (event) => {
    state.axis = event.target.value;
    setRange(null);
  });
  const losses = views.filter((view) => view.panel.log);
  one("#log").disabled = !losses.length;
  one("#log").setAttribute("aria-pressed", String(losses.length > 0));
  one("#log").addEventListener("click", (event) => {
    const isLog = event.target.getAttribute("aria-pressed") !== "true";
    event.target.setAttribute("aria-pressed", String(isLog));
    losses.forEach((view) => view.setLog(isLog));
  });
  one("#reset").addEventListener("click", () => setRange(null));
  one("#theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "light"));
  return group;
}

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
}

function build() {
  const preference = matchMedia("(prefers-color-scheme: dark)");
  setTheme(preference.matches);
  preference.addEventListener("change", () => setTheme(preference.matches));
  if (several) document.getElementById("controls").append(runButtons());
  document.getElementById("controls").append(settings());
  document.body.append(tip);
  const target = document.getElementById("panels");
  let grid = null;
  let section = null;
  for (const view of views) {
    if (view.panel.section !== section) {
      section = view.panel.section;
      grid = made("div", view.isLarge ? "grid large" : "grid");
      target.append(made("h2", "", escaped(section)), grid);
    }
    grid.append(view.element);
  }
  redraw();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) {
      width = innerWidth;
      redraw();
    }
  });
}

build();
