"use strict";
const root = document.documentElement;
const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme:dark)").matches ? "dark" : "light")) === "dark";
document.querySelector("#theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; });
document.querySelector("#exact").addEventListener("click", event => {
  event.target.ariaPressed = String(document.body.classList.toggle("exact"));
});
for (const area of document.querySelectorAll(".area")) {
  const {across, up, xName, unit, factor, lines} = JSON.parse(area.querySelector("script").textContent);
  const points = lines.flatMap(line => line.x.map((x, i) => ({x, y: line.y[i], text: line.t[i], name: line.n, color: line.l})));
  points.sort((a, b) => a.x - b.x);
  const dot = area.querySelector(".dot"), tip = area.querySelector(".tip");
  const place = (v, [low, high, log]) => log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low || 1);
  const left = p => place(p.x, across), down = p => 1 - place(p.y, up);
  const bytes = y => unit && " (" + y.toLocaleString("en") + " B)";
  let at = -1;
  const show = i => {
    at = Math.max(0, Math.min(points.length - 1, i));
    const p = points[at];
    area.classList.add("on");
    dot.className = "dot l" + p.color;
    dot.style.left = 100 * left(p) + "%";
    dot.style.top = 100 * down(p) + "%";
    tip.textContent = (p.text ? p.text + " · " : "") + p.name + " " + (p.y / factor).toFixed(2) + " " + unit + bytes(p.y) + " · " + xName + " " + p.x;
    tip.style.left = left(p) < .5 ? 100 * left(p) + "%" : "auto";
    tip.style.right = left(p) < .5 ? "auto" : 100 * (1 - left(p)) + "%";
  };
  const hide = () => area.classList.remove("on");
  area.addEventListener("pointermove", event => {
    const box = area.getBoundingClientRect();
    let best = 0, least = Infinity;
    points.forEach((p, i) => {
      const far = Math.hypot((left(p) * box.width - event.clientX + box.left), (down(p) * box.height - event.clientY + box.top) / 3);
      if (far < least) { least = far; best = i; }
    });
    show(best);
  });
  area.addEventListener("pointerleave", hide);
  area.addEventListener("blur", hide);
  area.addEventListener("focus", () => show(at < 0 ? points.indexOf(points.reduce((a, b) => b.y > a.y ? b : a)) : at));
  area.addEventListener("keydown", event => {
    const to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: points.length - 1}[event.key];
    if (to !== undefined) { event.preventDefault(); show(to); }
    if (event.key === "Escape") hide();
  });
}
