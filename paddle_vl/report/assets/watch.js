// Asks for newer data once a second; what the reader has chosen stays.

const shapeOf = (all) => JSON.stringify(all, ["axes", "panels", "name", "is_folded", "curves", "run", "key"]);

async function refresh() {
  const answer = await fetch(`/?since=${document.getElementById("tables").dataset.version}`);
  if (answer.status !== 200) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const found = dataOf(fresh);
  // Another panel or curve needs another page.
  if (shapeOf(found) !== shapeOf(data)) return location.reload();
  data = found;
  const folds = (page) => [...page.querySelectorAll("#tables details")];
  const [before, after] = [folds(document), folds(fresh)];
  after.forEach((one, i) => (one.open = before[i]?.open ?? one.open));
  document.getElementById("tables").replaceWith(fresh.getElementById("tables"));
  redraw();
}

// The run or the server may be away for a while.
setInterval(() => refresh().catch(() => {}), 1000);
