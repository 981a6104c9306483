// Asks for newer data once a second; what the reader has chosen stays.

let version = document.body.dataset.version;
const tables = document.getElementById("tables");
const shapeOf = (all) => JSON.stringify([all.axes, all.panels.map((one) => [one.name, one.folded, one.curves.map((curve) => [curve.run, curve.key])])]);

async function refresh() {
  const answer = await fetch(`/data?since=${version}`);
  if (answer.status !== 200) return;
  const fresh = await answer.json();
  // Another panel or curve needs other buttons.
  if (shapeOf(fresh.data) !== shapeOf(data)) return location.reload();
  version = fresh.version;
  Object.assign(data, expanded(fresh.data));
  views.forEach((view, i) => (view.panel = data.panels[i]));
  const folds = () => [...tables.querySelectorAll("details")];
  const open = folds().map((one) => one.open);
  tables.innerHTML = fresh.tables;
  folds().forEach((one, i) => (one.open = open[i] ?? one.open));
  redraw();
}

// The run or the server may be away for a while.
setInterval(() => refresh().catch(() => {}), 1000);
