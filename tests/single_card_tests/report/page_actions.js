// Run in a page: uses what it can do, and returns what went wrong.
(async () => {
  const problems = [];
  const check = (name, isTrue) => isTrue || problems.push(name);
  const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const drawnSeries = () => [...plots.values()].flatMap((plot) => plot.series.slice(1));
  const count = () => drawnSeries().filter((one) => one._paths?.stroke).length;
  const set = async (control, change, kind = "input") => {
    Object.assign(control, change);
    control.dispatchEvent(new Event(kind, { bubbles: true }));
    await frame();
  };
  /** Red pixels along the foot of a panel, where skipped updates are marked. */
  const marks = (plot) => {
    const { left, top, width, height } = plot.bbox;
    const foot = plot.ctx.getImageData(left, top + height - 1, width, 1).data;
    return foot.filter((_, i) => i % 4 === 0 && foot[i] === 201 && foot[i + 1] === 42 && foot[i + 2] === 42).length;
  };

  await frame();
  const folded = document.querySelector("#panels > details");
  check("what is always zero is folded", !folded.open && folded.querySelectorAll("figure").length === 1 && folded.querySelector("[data-panel=skipped_samples]"));
  folded.open = true;
  await frame();
  const all = count();
  check("every curve", all === data.panels.flatMap((panel) => panel.curves).length);
  check("a mark for the skips", marks(plots.get("loss")) > 0 && marks(plots.get("epoch")) === 0);
  const gaps = () => plots.get("loss").series[1]._paths.gaps;
  check("a value that is null interrupts", gaps().length === 1 && plots.get("loss").series[1]._paths.stroke);
  await set(form.run[0], { checked: false });
  check("a run is hidden", count() < all && count() > 0);
  await set(form.run[0], { checked: true });
  check("and shown", count() === all);
  document.querySelector("[data-panel=loss] .u-series:nth-child(2) th").click();
  await frame();
  check("a curve is hidden", count() === all - 1);
  document.querySelector("[data-panel=loss] .u-series:nth-child(2) th").click();
  await frame();
  check("and seen again", count() === all);
  await set(form.smoothing, { value: 0.9 });
  check("smoothed over raw", drawnSeries().filter((one) => one.class === "raw").length > 0);
  for (const axis of data.axes) {
    await set(form.axis, { value: axis }, "change");
    check(axis, count() > all);
  }
  const at = (kind, x) => {
    const { over } = plots.get("loss");
    const box = over.getBoundingClientRect();
    const place = { clientX: box.left + x, clientY: box.top + 60, button: 0, movementX: 1, bubbles: true };
    (kind === "mouseup" ? document : over).dispatchEvent(new MouseEvent(kind, place));
  };
  await set(form.axis, { value: "step" }, "change");
  at("mousemove", plots.get("loss").over.clientWidth - 2);
  await frame();
  const told = document.querySelector("[data-panel=loss] .u-legend").textContent;
  check("values at the pointer", told.includes("training") && told.startsWith("step30"));
  at("mousedown", 150);
  at("mousemove", 300);
  at("mouseup", 300);
  await frame();
  const { min, max } = plots.get("grad_norm").scales.x;
  check("looks closer, in all panels", max - min < 15 && max - min > 1);
  at("dblclick", 100);
  await frame();
  check("and back", plots.get("grad_norm").scales.x.max === 30);
  const log = document.querySelector("[data-panel=grad_norm] input");
  check("linear norm", plots.get("grad_norm").scales.y.distr === 1);
  await set(log, { checked: true });
  check("log only if it tells more", plots.get("grad_norm").scales.y.distr === 1);
  return problems;
})()
