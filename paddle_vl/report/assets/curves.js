// Curves: where their points are, and the paths through them.

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
  let mean = 0;
  let total = 0;
  let isCut = true;
  const points = [];
  curve.values.forEach((value, i) => {
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
