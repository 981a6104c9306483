"use strict";

// Draws the element `data` (see paddle_vl/report/page.py) as panels, and listens to the reader.

function expanded(all) {
  for (const curve of all.panels.flatMap((panel) => panel.curves)) curve.steps = all.steps[curve.steps];
  return all;
}

const data = expanded(JSON.parse(document.getElementById("data").textContent));
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
