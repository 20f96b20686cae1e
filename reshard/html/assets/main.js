// Draw everything, once the data are there.

function themeButton() {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to ${button.textContent.toLowerCase()} colours`);
    repaint();
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    show();
  });
  system.addEventListener("change", show);
  let chosen;
  window.addEventListener("beforeprint", () => {
    chosen = root.dataset.theme;
    root.dataset.theme = "light";
    root.dataset.printed = "yes";
    for (const details of document.querySelectorAll("details")) details.open = true;
    repaint();
  });
  window.addEventListener("afterprint", () => {
    if (chosen) root.dataset.theme = chosen;
    else delete root.dataset.theme;
    delete root.dataset.printed;
    repaint();
  });
  show();
}

const DRAWN_BY = {
  bars: () => {}, // the markup has them
  curves: drawCurves,
  maps: drawMaps,
  table: (place, { title, columns }) => new DataTable(place, columns, title),
};

async function start() {
  const sections = await unpacked(document.getElementById("data").textContent);
  const places = document.querySelectorAll("section > .drawn");
  sections.forEach(([kind, data], number) => DRAWN_BY[kind](places[number], data));
  themeButton();
  document.documentElement.dataset.ready = "yes";
}

start();
