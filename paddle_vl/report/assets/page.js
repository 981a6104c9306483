// The page: its controls, and its panels in sections.

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
  for (const view of views.filter((one) => !one.panel.folded)) {
    if (view.panel.section !== section) {
      section = view.panel.section;
      grid = made("div", view.isLarge ? "grid large" : "grid");
      target.append(made("h2", "", escaped(section)), grid);
    }
    grid.append(view.element);
  }
  const folded = views.filter((one) => one.panel.folded);
  if (folded.length) {
    const titles = folded.map((one) => escaped(one.panel.title)).join(", ");
    const details = made("details", "", `<summary>Nothing to see (always zero, or as in other panels): ${titles}</summary>`);
    const inside = made("div", "grid");
    inside.append(...folded.map((one) => one.element));
    details.append(inside);
    details.addEventListener("toggle", redraw); // A folded panel has no width.
    target.append(details);
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
