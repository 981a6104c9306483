"use strict";

// Draws the element `data` (see `page_data` of paddle_vl/report/report.py) into the page's figures.

const dataOf = (page) => JSON.parse(page.getElementById("data").textContent);
let data = dataOf(document);
const form = document.forms.controls;
const several = data.runs.length > 1;
const figures = document.querySelectorAll("#panels figure");
const plots = new Map(); // By the name of their panel.
const hidden = new Set(); // Curves that the reader has switched off in a legend.
// Of several runs, for each look: as drawn, and in the legend.
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [4, 2]];
const BORDERS = ["solid", "dashed", "dotted", "dashed", "dashed"];
// Larger numbers overflow in sums, smaller ones in logarithms.
const LARGEST = 1e150;
let range = null; // What the reader looks at of the horizontal axis.
let places = []; // By run, see `placer`.
let request = null;

const colourOf = (number) => data.colours[number % data.colours.length];
const isShown = (run) => !several || form.run[run].checked;

/** Six digits, short for very small and large numbers. */
function shown(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e15)) return value.toExponential(3).replace(/\.?0+e/, "e");
  const notation = size < 1e4 ? "standard" : "compact";
  return value.toLocaleString("en-US", { notation, maximumSignificantDigits: 6 });
}

/** From a run's steps to the chosen horizontal quantity, linear between its lines. */
function placer(run) {
  const axis = form.axis.value;
  if (axis === "step") return (steps) => steps;
  const curves = data.panels.flatMap((panel) => panel.curves);
  const { steps, values } = curves.find((one) => one.run === run && one.key === axis);
  const known = data.steps[steps].map((step, i) => [step, values[i]]).filter(([, value]) => value !== null);
  return (ascending) => {
    let i = 0;
    return ascending.map((step) => {
      while (i + 2 < known.length && known[i + 1][0] <= step) i++;
      const [[from, low], [to, high]] = [known[i], known[i + 1]];
      return low + ((step - from) / (to - from)) * (high - low);
    });
  };
}

/** From the first to the last line of all runs that are shown: the same in all panels. */
function wholeRange() {
  const curves = data.panels.flatMap((panel) => panel.curves).filter((one) => isShown(one.run));
  const ends = curves.flatMap(({ run, steps }) => places[run]([data.steps[steps][0], data.steps[steps].at(-1)]));
  if (!ends.length) return [0, 1];
  const [low, high] = [ends.reduce((a, b) => Math.min(a, b)), ends.reduce((a, b) => Math.max(a, b))];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

/** The vertical axis for values from the least to the most. */
function heights(low, high, isLog) {
  if (low === null || low > high) return isLog ? [0.1, 1] : [0, 1];
  if (isLog) {
    const ended = (value, end) => {
      const unit = 10 ** Math.floor(Math.log10(value));
      return Number((end(value / unit) * unit).toPrecision(12));
    };
    return [ended(low, Math.floor), ended(high, Math.ceil)];
  }
  const isFlat = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));
  const room = isFlat ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.05;
  // Amounts are compared by their height; what hardly varies is looked at closely.
  return [low >= 0 && low <= 0.6 * high ? 0 : low - room, high + room];
}

/** A number, null for a gap; undefined, which is passed over, if it is too large. */
function drawable(value) {
  if (value === null) return null;
  const size = Math.abs(value);
  return size >= LARGEST ? undefined : size < 1 / LARGEST ? 0 : value;
}

/** Exponential means, unbiased at the beginning. */
function smoothed(values, weight) {
  let [mean, total] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

/** What uPlot draws of a panel: its series, their points, and bands between least and most. */
function seriesOf(panel) {
  const axis = form.axis.selectedOptions[0].text;
  const series = [{ label: axis, value: (_, x) => (x === null ? "-" : shown(x)) }];
  const [tables, bands, edges] = [[], [], new Map()];
  for (const curve of panel.curves.filter((one) => isShown(one.run))) {
    const name = `${curve.run} ${curve.key}`;
    const stroke = colourOf(several ? curve.run : curve.look);
    const style = several ? curve.look % DASHES.length : 0;
    const look = { stroke, name, show: !hidden.has(name), dash: DASHES[style], border: BORDERS[style] };
    const xs = places[curve.run](data.steps[curve.steps]);
    let values = curve.values.map(drawable);
    const weight = curve.is_noisy ? Number(form.smoothing.value) : 0;
    if (weight) {
      // Faint, and not in the legend.
      series.push({ ...look, class: "raw", alpha: 0.25, points: { show: false } });
      tables.push([xs, values]);
      values = smoothed(values, weight);
    }
    const isEdge = ["min", "max"].includes(curve.statistic);
    series.push({
      ...look,
      label: [several ? data.runs[curve.run].name : "", curve.label].filter(Boolean).join(", ") || panel.title,
      width: isEdge ? 0.8 : 1.6,
      alpha: isEdge ? 0.5 : 1,
      points: curve.is_sparse && !isEdge ? { show: true, size: curve.is_eval ? 6 : 4, fill: stroke } : {},
      value: (_, value, __, i) => (i === null ? "-" : value === null ? "not finite" : shown(value)),
    });
    tables.push([xs, values]);
    if (isEdge) {
      const of = [curve.run, curve.look, curve.is_eval].join(" ");
      const ends = edges.get(of) || edges.set(of, { colour: stroke }).get(of);
      ends[curve.statistic] = series.length - 1;
    }
  }
  for (const { min, max, colour } of edges.values()) {
    if (min && max) bands.push({ series: [max, min], fill: colour + "26" });
  }
  return { series, bands, data: tables.length ? uPlot.join(tables) : [[]] };
}

/** Whether a logarithmic axis tells more than a linear one. */
function differs([xs, ...curves], [low, high]) {
  let [least, most] = [Infinity, 0];
  for (const values of curves) {
    values.forEach((value, i) => {
      if (value > 0 && xs[i] >= low && xs[i] <= high) [least, most] = [Math.min(least, value), Math.max(most, value)];
    });
  }
  return most > 2.5 * least;
}

/** Where runs were resumed, and where updates were skipped: as a bar over the steps and a triangle. */
function mark(plot, panel) {
  const { ctx, bbox } = plot;
  const [bottom, unit] = [bbox.top + bbox.height, devicePixelRatio];
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height + 2);
  ctx.clip();
  data.runs.forEach((run, i) => {
    if (!isShown(i)) return;
    const x = (step) => plot.valToPos(places[i]([step])[0], "x", true);
    ctx.strokeStyle = several ? colourOf(i) : "#888";
    ctx.setLineDash([2 * unit, 4 * unit]);
    for (const at of run.resumed.map(x)) ctx.stroke(new Path2D(`M${at} ${bbox.top}V${bottom}`));
    ctx.fillStyle = "#c92a2a";
    for (const [after, until] of panel.tells_skipped ? run.skipped : []) {
      ctx.fillRect(x(after), bottom - 2 * unit, x(until) - x(after), 3 * unit);
      ctx.fill(new Path2D(`M${x(until)} ${bottom - 11 * unit}l${5 * unit} ${10 * unit}h${-10 * unit}z`));
    }
  });
  ctx.restore();
}

function draw(figure) {
  const panel = data.panels.find((one) => one.name === figure.dataset.panel);
  const width = figure.querySelector("div").clientWidth;
  plots.get(panel.name)?.destroy();
  // What is folded has no width.
  if (!width) return;
  const { series, bands, data: points } = seriesOf(panel);
  const ends = range || wholeRange();
  const isLog = figure.querySelector("input").checked && differs(points, ends);
  const values = (_, ticks) => ticks.map((tick) => (tick === null ? "" : shown(tick)));
  const common = { values, font: "11px system-ui", labelFont: "12px system-ui", stroke: "#5b6570" };
  const options = {
    width, height: 260, series, bands,
    scales: {
      x: { time: false, range: ends },
      y: { distr: isLog ? 3 : 1, range: (_, low, high) => heights(low, high, isLog) },
    },
    axes: [
      { ...common, label: series[0].label, labelSize: 18, size: 32 },
      { ...common, label: panel.unit, labelSize: 18, size: 54 },
    ],
    legend: { markers: { dash: (plot, i) => plot.series[i].border } },
    cursor: {
      y: false,
      drag: { setScale: false },
      hover: { prox: 30 },
      bind: { dblclick: () => () => look(null) },
      sync: { key: "runs", filters: { pub: (event) => ["mousemove", "mouseleave"].includes(event) } },
    },
    hooks: {
      draw: [(plot) => mark(plot, panel)],
      setSelect: [({ select: { left, width }, posToVal }) => {
        if (width > 5) look([left, left + width].map((place) => posToVal(place, "x")));
      }],
      setSeries: [(plot, i, { show }) => {
        if (show === undefined || !i) return;
        hidden[show ? "delete" : "add"](plot.series[i].name);
        redraw();
      }],
    },
  };
  plots.set(panel.name, new uPlot(options, points, figure.querySelector("div")));
}

function look(part) {
  range = part;
  redraw();
}

/** Draw all again, once for all that happens before the next frame. */
function redraw() {
  cancelAnimationFrame(request);
  request = requestAnimationFrame(() => {
    form.querySelector("output").textContent = Number(form.smoothing.value).toFixed(2);
    places = data.runs.map((_, run) => placer(run));
    figures.forEach(draw);
  });
}

form.addEventListener("input", redraw);
form.axis.addEventListener("change", () => look(null));
document.getElementById("panels").addEventListener("input", redraw);
document.querySelector("#panels details")?.addEventListener("toggle", redraw);
addEventListener("resize", redraw);
redraw();
