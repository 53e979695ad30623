"use strict";
const tip = document.getElementById("tip");
const nearest = (steps, step) => {
  let [low, high] = [0, steps.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle; else high = middle;
  }
  return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
};
const shown = (value) => value === null ? "not finite" : Number(value.toPrecision(6)).toString();
for (const script of document.querySelectorAll("figure > script")) {
  const data = JSON.parse(script.textContent);
  const svg = script.parentElement.querySelector("svg");
  const line = svg.querySelector(".at");
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const part = Math.min(1, Math.max(0, (x - data.left) / (data.right - data.left)));
    const step = data.low + part * (data.high - data.low);
    line.setAttribute("x1", data.left + part * (data.right - data.left));
    line.setAttribute("x2", data.left + part * (data.right - data.left));
    line.setAttribute("visibility", "visible");
    tip.textContent = data.series.filter(([, , steps]) => steps.length > 0).map(([name, , steps, values]) => {
      const at = nearest(steps, step);
      return `${name}: ${shown(values[at])} (step ${steps[at]})`;
    }).join("\n");
    tip.hidden = false;
    tip.style.left = Math.min(event.clientX + 14, Math.max(0, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    line.setAttribute("visibility", "hidden");
  });
}
