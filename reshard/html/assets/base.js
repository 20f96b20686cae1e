// What every part of the page uses. The parts make one script: a name is that of one thing.
"use strict";

// Errors are counted where a test can see them.
window.addEventListener("error", (event) => {
  document.documentElement.dataset.error = event.message;
});
window.addEventListener("unhandledrejection", (event) => {
  document.documentElement.dataset.error = String(event.reason);
});

// An element with properties and children; texts are texts, never markup.
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// The data that the page carries: JSON, deflated, in base64.
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// Sizes as reshard writes them: decimal units, three digits.
function sizeText(nbytes) {
  let value = nbytes;
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (value < 1000) return `${unit === "B" ? value : Number(value.toPrecision(3))} ${unit}`;
    value /= 1000;
  }
  return `${Number(value.toPrecision(3))} TB`;
}

const GROUPED = new Intl.NumberFormat("en-US");

function numberText(value) {
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return GROUPED.format(value);
  return Number(value.toPrecision(4)).toString();
}

function shapeText(shape) {
  return `[${shape.join(", ")}]`;
}

// A colour of the style sheet as it is now.
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Called again whenever colours change: by the button, by the system, for print.
const painters = [];

function repaint() {
  for (const paint of painters) paint();
}

// Call at most once a frame.
function perFrame(call) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      call();
    });
  };
}
