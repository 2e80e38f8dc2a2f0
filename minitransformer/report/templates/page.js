"use strict";
// What is under the pointer is named; without scripts the page only loses this.
const tip = document.getElementById("tip");

function show(text, event) {
  tip.textContent = text;
  tip.hidden = false;
  const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 6);
  const above = event.clientY - tip.offsetHeight - 12;
  tip.style.transform = `translate(${Math.max(6, x)}px, ${above > 4 ? above : event.clientY + 18}px)`;
}

function watch(element, say, leave = () => {}) {
  const move = (event) => {
    const text = say(event);
    if (text) show(text, event);
    else tip.hidden = true;
  };
  element.addEventListener("pointermove", move);
  element.addEventListener("pointerdown", move);
  element.addEventListener("pointerleave", () => { tip.hidden = true; leave(); });
}

for (const element of document.querySelectorAll(".text, .tiles")) {
  watch(element, (event) => event.target.closest("[data-tip]")?.dataset.tip);
}

for (const figure of document.querySelectorAll(".chart")) {
  const { left, right, from, to, over, lines } = JSON.parse(figure.dataset.hover);
  const plot = figure.querySelector(".plot"), cursor = figure.querySelector(".cursor");
  const place = (x) => left + (right - left) * (x - from) / (to - from);
  watch(plot, (event) => {
    const box = plot.getBoundingClientRect();
    const x = from + (to - from) * ((event.clientX - box.left) / box.width - left) / (right - left);
    const near = lines.map((line) => {
      let best = 0;
      line.x.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(line.x[best] - x)) best = i; });
      return { name: line.name, x: line.x[best], y: line.y[best] };
    });
    const at = near.reduce((a, b) => Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a).x;
    cursor.hidden = false;
    cursor.style.left = `${100 * place(at)}%`;
    const number = (y) => y.toLocaleString("en", { maximumSignificantDigits: 5 });
    return near.map((p) => `${p.name} ${number(p.y)} at ${over} ${p.x.toLocaleString("en")}`).join("\n");
  }, () => { cursor.hidden = true; });
}

for (const maps of document.querySelectorAll(".maps")) {
  const names = JSON.parse(maps.dataset.names);
  for (const map of maps.querySelectorAll(".map")) {
    const weights = JSON.parse(map.dataset.weights);
    watch(map, (event) => {
      const box = map.querySelector("image").getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left) / box.width * names.length);
      const row = Math.floor((event.clientY - box.top) / box.height * names.length);
      if (!(row in weights) || !(column in weights[row])) return "";
      return `${names[row]} looks at ${names[column]}: ${weights[row][column].toFixed(3)}`;
    });
  }
}
