// A panel: axes, marks, bands and lines, and what the pointer does over it.

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
            && one.curve.look === curve.look,
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
