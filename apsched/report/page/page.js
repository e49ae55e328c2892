"use strict";
// Unpacks the data, draws the pictures, and wires the buttons. Nothing is fetched: the page is all there is.
async function unpacked() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent.trim()), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

function themes(pictures) {
  const root = document.documentElement, button = document.getElementById("theme");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const redraw = () => { button.textContent = dark() ? "Light" : "Dark"; pictures.forEach((picture) => picture.view.redraw()); };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => { root.dataset.print = "1"; pictures.forEach((picture) => picture.draw()); });
  addEventListener("afterprint", () => { delete root.dataset.print; redraw(); });
  redraw();
}

function tools(figure, picture) {
  const acts = { in: () => picture.view.zoom(2), out: () => picture.view.zoom(0.5), reset: () => picture.view.reset(),
                 left: () => picture.view.pan(-0.4), right: () => picture.view.pan(0.4) };
  for (const button of figure.querySelectorAll("[data-act]")) {
    if (button.dataset.act in acts) button.addEventListener("click", acts[button.dataset.act]);
  }
}

async function main() {
  const data = await unpacked(), tip = new Tip(), pictures = [];
  for (const figure of document.querySelectorAll("figure[data-picture]")) {
    const graph = data.graphs[Number(figure.dataset.graph)], kind = figure.dataset.picture;
    const picture = kind === "frontier" ? new Frontier(figure, data.frontiers[Number(figure.dataset.graph)], data, tip)
      : kind === "timeline" ? new Timeline(figure, graph, data, tip)
      : new Memory(figure, graph, graph.orders[Number(figure.dataset.order)], data, tip);
    tools(figure, picture);
    figure.picture = picture;
    pictures.push(picture);
  }
  themes(pictures);
  pictures.forEach((picture) => picture.draw());
  document.documentElement.dataset.ready = "1";
}

main().catch((error) => {
  const note = document.getElementById("trouble");
  note.hidden = false;
  note.textContent = `The pictures cannot be drawn: ${error}. Any browser of 2023 or later will do; the tables are complete without them.`;
  throw error;
});
