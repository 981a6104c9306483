// Appended to a page: uses what it can do, and tells in its title what went wrong.
const problems = [];
const check = (name, isTrue) => isTrue || problems.push(name);
const count = () => document.querySelectorAll("path.curve").length;
const all = count();
check("every curve", all === data.panels.flatMap((panel) => panel.curves).length);
check("a mark for every skip", document.querySelectorAll("figure[data-panel=loss] .skipped").length === 2);
check("a value that is null interrupts", document.querySelector("path.curve").getAttribute("d").match(/M/g).length === 2);
const folded = document.querySelector("#panels > details");
check("what is always zero is folded", !folded.open && folded.querySelectorAll("figure").length === 1 && folded.querySelector("[data-panel=skipped_samples]"));
folded.open = true;
document.querySelector(".runs button").click();
check("a run is hidden", count() < all && count() > 0);
document.querySelector(".runs button").click();
check("and shown", count() === all);
document.getElementById("smoothing").value = 0.9;
document.getElementById("smoothing").dispatchEvent(new Event("input"));
check("smoothed over raw", document.querySelectorAll("path.raw").length > 0);
for (const axis of Object.keys(data.axes)) {
  document.getElementById("axis").value = axis;
  document.getElementById("axis").dispatchEvent(new Event("change"));
  check(axis, count() > all);
}
const svg = views[0].svg;
const box = svg.getBoundingClientRect();
const at = (kind, x) => svg.dispatchEvent(new PointerEvent(kind,
  { clientX: box.left + x, clientY: box.top + 60, button: 0, pointerType: "mouse", bubbles: true }));
at("pointermove", box.width - 21);
check("values at the pointer", tip.textContent.includes("training") && tip.textContent.includes("step 30"));
at("pointerdown", 150);
at("pointermove", 300);
at("pointerup", 300);
check("looks closer", state.range !== null && state.range[1] - state.range[0] < 150);
document.getElementById("reset").click();
check("and back", state.range === null);
document.getElementById("log").click();
check("linear loss", views[0].isLog === false);
check("no NaN", !document.getElementById("panels").innerHTML.includes("NaN"));
document.title = problems.length ? `failed: ${problems.join(", ")}` : "all done";
