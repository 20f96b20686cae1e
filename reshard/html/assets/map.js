// Where the bytes lie: rows of ranks, bytes across, drawn pixel by pixel so that a thousand ranks
// with a million pieces take a moment.

const KINDS = ["param", "master", "exp_avg", "exp_avg_sq", "buffer"]; // others share a colour
const WEIGHTS = ["param", "master", "buffer"];
const TALLEST_ROW = 26; // CSS pixels
const TALLEST_MAP = 560;
const AXIS = 22; // room below for the scale
const FEWEST_BYTES = 64; // across, at the nearest

// One side of the data, with what drawing needs.
class Side {
  constructor(data) {
    Object.assign(this, data);
    this.layouts.forEach((layout) => {
      layout.places = null; // tensor -> its pieces, made when a tensor is marked
    });
    this.rows = data.rows.map(([label, rank, files, layout, index]) => {
      const ends = [];
      let end = 0;
      for (const file of files) ends.push((end += this.files[file][1]));
      return { label, rank, files, ends, bytes: end, layout: this.layouts[layout], index };
    });
    this.widest = Math.max(1, ...this.rows.map((row) => row.bytes));
    this.bytes = this.rows.reduce((sum, row) => sum + row.bytes, 0);
    this.byKey = new Map();
    this.tensors.forEach(([fqn, kind], number) => {
      for (const key of [`${kind} ${fqn}`, ...(WEIGHTS.includes(kind) ? [`weight ${fqn}`] : [])]) {
        if (!this.byKey.has(key)) this.byKey.set(key, []);
        this.byKey.get(key).push(number);
      }
    });
    this.kinds = new Map(data.kinds); // kind -> bytes
  }

  // The same tensor as one of another side; a weight may be a master there.
  counterparts(tensor) {
    const [fqn, kind] = tensor;
    const weights = WEIGHTS.includes(kind) ? this.byKey.get(`weight ${fqn}`) : undefined;
    return this.byKey.get(`${kind} ${fqn}`) ?? weights ?? [];
  }

  piecesOf(layout, tensor) {
    if (!layout.places) {
      layout.places = new Map();
      layout.tensor.forEach((number, piece) => {
        if (!layout.places.has(number)) layout.places.set(number, []);
        layout.places.get(number).push(piece);
      });
    }
    return layout.places.get(tensor) ?? [];
  }

  // The piece of a row at a byte; -1 where there is none.
  pieceAt(row, byte) {
    const { offset, nbytes } = row.layout;
    const last = upperBound(offset, byte) - 1;
    for (let piece = last; piece >= 0 && piece > last - 4; piece--) {
      if (byte < offset[piece] + nbytes[piece]) return piece;
    }
    return -1;
  }

  // What there is to say of a piece; `at` are bytes of its own file.
  told(row, piece) {
    const { tensor, offset, nbytes, shape, start, step, more } = row.layout;
    const [fqn, kind, dtype, whole, itemsize] = this.tensors[tensor[piece]];
    const file = this.fileAt(row, offset[piece]);
    const at = offset[piece] - file.start;
    const first = start[piece] + row.index * step[piece];
    const box = shape[piece] < 0 ? null : this.shapes[shape[piece]];
    return {
      ...{ fqn, kind, dtype, more: more[piece], first, whole: this.shapes[whole] },
      ...{ file: file.name, at, stop: at + nbytes[piece], nbytes: nbytes[piece] },
      held: box ? shapeText(box) : counting(nbytes[piece] / itemsize, "element"),
    };
  }

  fileAt(row, byte) {
    const number = Math.min(upperBound(row.ends, byte), row.ends.length - 1);
    const [name, nbytes] = this.files[row.files[number]];
    return { name, nbytes, start: row.ends[number] - nbytes };
  }
}

// How many of ascending numbers are at most a value.
function upperBound(numbers, value) {
  let low = 0;
  let high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// #rrggbb as a pixel of an ImageData.
function pixel(hex) {
  const [red, green, blue] = [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

// A colour that has stepped back, mostly that of the paper.
function faded(colour, paper) {
  let made = 255 << 24;
  for (const shift of [0, 8, 16]) {
    const [one, two] = [(colour >>> shift) & 255, (paper >>> shift) & 255];
    made |= Math.round(one * 0.14 + two * 0.86) << shift;
  }
  return made >>> 0;
}

const colourOfKind = (kind) => colour(`kind-${KINDS.includes(kind) ? kind : "slot"}`);

// What all maps of a page share: what is marked, and which pieces stand out.
class Shared {
  constructor() {
    this.maps = [];
    this.marked = null; // a tensor, as its side has it
    this.only = null; // says of a tensor whether it stands out; null: all do
    this.chosen = null; // the chip that says so
    this.words = []; // of names that alone stand out
    this.sameScale = false;
  }

  standsOut(tensor) {
    if (this.only && !this.only(tensor)) return false;
    const name = tensor[0].toLowerCase();
    return this.words.every((word) => name.includes(word));
  }

  mark(tensor) {
    if (this.marked === tensor) return;
    this.marked = tensor;
    for (const map of this.maps) map.drawMarks();
  }

  draw() {
    for (const map of this.maps) map.draw();
  }
}

class ShardMap {
  constructor(place, side, shared, onRow) {
    this.side = side;
    this.shared = shared;
    this.onRow = onRow;
    shared.maps.push(this);
    this.build(place);
    this.fit();
    this.listen();
    painters.push(() => this.draw());
    new ResizeObserver(perFrame(() => this.draw())).observe(this.stage);
  }

  build(place) {
    const { side } = this;
    const rows = side.rows.length;
    const ranks = side.rows.filter((row) => row.rank !== null).length;
    const counted = [
      ranks ? counting(ranks, "rank") : "",
      rows > ranks ? `${counting(rows - ranks, "row")}${ranks ? " of no rank" : ""}` : "",
    ];
    const undrawn = side.undrawn.length
      ? `; ${counting(side.undrawn.length, "file")} without tensors not drawn`
      : "";
    const coarse = side.coarse
      ? `; neighbours below ${sizeText(side.coarse)} drawn together`
      : "";
    const button = (text, label, act) => {
      const made = element("button", { type: "button", textContent: text, title: label });
      made.setAttribute("aria-label", `${label}: ${side.title}`);
      made.addEventListener("click", act);
      return made;
    };
    this.rankField = element("input", { type: "search", placeholder: "Rank", size: 6 });
    this.rankField.setAttribute("aria-label", `Rank or file to show: ${side.title}`);
    this.rankField.addEventListener("change", () => this.find(this.rankField.value));
    const tools = element(
      "div",
      { className: "map-tools" },
      this.rankField,
      button("−", "Zoom out", () => this.zoom(0.5)),
      button("+", "Zoom in", () => this.zoom(2)),
      button("All", "Show all", () => this.reset()),
    );
    const text = `${counted.filter(Boolean).join(" and ")}, ${sizeText(side.bytes)}${undrawn}${coarse}`;
    const head = element(
      "div",
      { className: "map-head" },
      element("h3", {}, side.title, " ", element("span", { className: "count", textContent: text })),
      tools,
    );
    this.canvas = element("canvas");
    this.marks = element("canvas", { className: "marks" });
    this.stage = element("div", { className: "stage", tabIndex: 0 }, this.canvas, this.marks);
    this.stage.setAttribute("role", "img");
    this.stage.setAttribute("aria-label", `Map of shards, ${side.title}: ${text}`);
    place.append(element("div", { className: "map" }, head, this.stage));
  }

  reset() {
    this.fit();
    this.draw();
  }

  fit() {
    const widest = this.shared.sameScale
      ? Math.max(...this.shared.maps.map((map) => map.side.widest))
      : this.side.widest;
    this.full = { x0: 0, x1: widest, r0: 0, r1: Math.max(this.side.rows.length, 1) };
    this.view = { ...this.full };
  }

  isWhole() {
    return Object.keys(this.full).every((key) => this.view[key] === this.full[key]);
  }

  // A row by its rank or a part of its file's name.
  find(text) {
    const wanted = text.trim().toLowerCase();
    if (!wanted) return this.reset();
    const rows = this.side.rows;
    let row = rows.findIndex(({ rank }) => rank !== null && String(rank) === wanted);
    if (row < 0) row = rows.findIndex(({ label }) => label.toLowerCase().includes(wanted));
    this.rankField.classList.toggle("missing", row < 0);
    if (row < 0) return undefined;
    const around = Math.min(4, rows.length);
    const r0 = Math.min(Math.max(row + 0.5 - around / 2, 0), rows.length - around);
    Object.assign(this.view, { r0, r1: r0 + around });
    this.draw();
    this.onRow(this.side, rows[row]);
    return undefined;
  }

  // Keep the view inside the map, and not nearer than there is something to see.
  moveTo(x0, x1, r0, r1) {
    const { full } = this;
    const rows = Math.min(full.r1, Math.max(r1 - r0, this.plot.height / TALLEST_ROW));
    const bytes = Math.min(full.x1, Math.max(x1 - x0, FEWEST_BYTES));
    const left = Math.min(Math.max(x0, 0), full.x1 - bytes);
    const top = Math.min(Math.max(r0, 0), full.r1 - rows);
    this.view = { x0: left, x1: left + bytes, r0: top, r1: top + rows };
    this.paint();
  }

  // `across` and `down` are the fixed point, 0 to 1 of the plot.
  zoom(factor, across = 0.5, down = 0.5) {
    const { x0, x1, r0, r1 } = this.view;
    const bytes = (x1 - x0) / factor;
    const rows = Math.max((r1 - r0) / factor, Math.min(this.full.r1, this.plot.height / TALLEST_ROW));
    const left = x0 + (x1 - x0 - bytes) * across;
    const top = r0 + (r1 - r0 - rows) * down;
    this.moveTo(left, left + bytes, top, top + rows);
  }

  draw() {
    const width = this.stage.clientWidth;
    if (!width) return;
    const rows = Math.min(this.side.rows.length * TALLEST_ROW, TALLEST_MAP);
    const ratio = window.devicePixelRatio || 1;
    const context = this.canvas.getContext("2d");
    context.font = this.font = `11px ${colour("mono")}`;
    const longest = Math.max(...this.side.rows.map(({ label }) => label.length), 4);
    const gutter = Math.ceil(
      Math.min(context.measureText("0").width * (longest + 1) + 6, width * 0.26, 220),
    );
    this.plot = { left: gutter, top: 0, width: width - gutter, height: Math.max(rows, 20) };
    const height = this.plot.height + AXIS;
    for (const canvas of [this.canvas, this.marks]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    this.stage.style.height = `${height}px`;
    this.ratio = ratio;
    this.palette = this.colours();
    this.paint();
  }

  // A pixel for each tensor, as the page's colours and choices are now.
  colours() {
    const paper = pixel(colour("panel"));
    const kinds = new Map();
    const tensors = this.side.tensors.map((tensor) => {
      const kind = tensor[1];
      if (!kinds.has(kind)) {
        const full = pixel(colourOfKind(kind));
        kinds.set(kind, [full, faded(full, paper)]);
      }
      return kinds.get(kind)[this.shared.standsOut(tensor) ? 0 : 1];
    });
    return { paper, tensors, rest: pixel(colour("rest")) };
  }

  paint() {
    this.stage.style.touchAction = this.isWhole() ? "pan-y" : "none";
    const { plot, ratio } = this;
    const context = this.canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    const width = Math.max(Math.round(plot.width * ratio), 1);
    const height = Math.max(Math.round(plot.height * ratio), 1);
    const image = new ImageData(width, height);
    this.fill(new Uint32Array(image.data.buffer), width, height);
    context.putImageData(image, Math.round(plot.left * ratio), 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawLabels(context);
    this.drawScale(context);
    this.drawMarks();
  }

  fill(pixels, width, height) {
    const { r0, r1 } = this.view;
    const tall = height / (r1 - r0); // pixels a row
    const gap = tall >= 5 ? Math.max(1, Math.round(tall * 0.12)) : 0;
    const strips = new Map();
    pixels.fill(this.palette.paper);
    for (let y = 0; y < height; y++) {
      const at = r0 + (y + 0.5) / tall;
      const number = Math.floor(at);
      const row = this.side.rows[number];
      if (!row || (number + 1 - at) * tall < gap) continue;
      if (!strips.has(row.layout)) strips.set(row.layout, new Map());
      const known = strips.get(row.layout);
      if (!known.has(row.bytes)) known.set(row.bytes, this.strip(row, width, gap > 0));
      pixels.set(known.get(row.bytes), y * width);
    }
  }

  // A row as one line of pixels: the kind that has most of a pixel gives it its colour.
  // Between neighbours there is a seam, where rows are tall enough for it to be a line.
  strip(row, width, hasSeams) {
    const { x0, x1 } = this.view;
    const { offset, nbytes, tensor } = row.layout;
    const { paper, rest, tensors } = this.palette;
    const scale = width / (x1 - x0);
    const line = new Uint32Array(width).fill(paper);
    line.fill(rest, 0, clamp(Math.round((row.bytes - x0) * scale), 0, width));
    const most = new Float32Array(width); // of a pixel that its colour covers
    const sum = new Float32Array(width); // of a pixel that any tensor covers
    const seams = [];
    let last = -1;
    let lastColour = 0;
    let share = 0;
    const first = Math.max(upperBound(offset, x0) - 4, 0);
    for (let piece = first; piece < offset.length && offset[piece] < x1; piece++) {
      const from = clamp((offset[piece] - x0) * scale, 0, width);
      const to = clamp((offset[piece] + nbytes[piece] - x0) * scale, 0, width);
      const painted = tensors[tensor[piece]];
      for (let x = Math.floor(from); x < to; x++) {
        const covered = Math.min(to, x + 1) - Math.max(from, x);
        share = x === last && painted === lastColour ? share + covered : covered;
        last = x;
        lastColour = painted;
        sum[x] += covered;
        if (share > most[x]) {
          most[x] = share;
          line[x] = painted;
        }
      }
      if (hasSeams && to - from >= 7) seams.push(Math.ceil(to) - 1);
    }
    for (let x = 0; x < width; x++) {
      if (sum[x] > 0 && most[x] < 1 - sum[x]) line[x] = rest;
    }
    for (const x of seams) line[x] = paper;
    return line;
  }

  drawLabels(context) {
    const { plot, view } = this;
    const tall = plot.height / (view.r1 - view.r0);
    let every = 1;
    while (every * tall < 18) every *= 2; // ranks come in powers of two
    context.font = this.font;
    context.fillStyle = colour("faint");
    context.textAlign = "right";
    context.textBaseline = "middle";
    const most = Math.floor((plot.left - 8) / context.measureText("0").width);
    const first = Math.ceil(Math.floor(view.r0) / every) * every;
    for (let number = first; number < view.r1; number += every) {
      const y = (number + 0.5 - view.r0) * tall;
      const row = this.side.rows[number];
      if (row && y >= 0) context.fillText(shortened(row.label, most), plot.left - 8, Math.max(y, 6));
    }
  }

  drawScale(context) {
    const { plot, view } = this;
    const step = niceStep((view.x1 - view.x0) / Math.max(plot.width / 110, 1));
    context.textAlign = "center";
    context.textBaseline = "top";
    context.strokeStyle = colour("line");
    for (let byte = Math.ceil(view.x0 / step) * step; byte <= view.x1; byte += step) {
      const x = plot.left + ((byte - view.x0) / (view.x1 - view.x0)) * plot.width;
      context.beginPath();
      context.moveTo(x, plot.height);
      context.lineTo(x, plot.height + 4);
      context.stroke();
      const text = scaleText(byte, step);
      const half = context.measureText(text).width / 2;
      context.fillText(text, clamp(x, plot.left + half, plot.left + plot.width - half), plot.height + 7);
    }
  }

  // The marked tensor, wherever it lies.
  drawMarks() {
    const context = this.marks.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.marks.width, this.marks.height);
    if (!this.shared.marked) return;
    const { plot, view, side } = this;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.beginPath();
    context.rect(plot.left, 0, plot.width, plot.height);
    context.clip();
    context.fillStyle = colour("mark");
    const tall = plot.height / (view.r1 - view.r0);
    const scale = plot.width / (view.x1 - view.x0);
    const tensors = side.counterparts(this.shared.marked);
    const last = Math.min(Math.ceil(view.r1), side.rows.length);
    for (let number = Math.max(Math.floor(view.r0), 0); number < last; number++) {
      const { layout } = side.rows[number];
      const y = (number - view.r0) * tall;
      for (const piece of tensors.flatMap((tensor) => side.piecesOf(layout, tensor))) {
        const x = plot.left + (layout.offset[piece] - view.x0) * scale;
        const wide = Math.max(layout.nbytes[piece] * scale, 3);
        context.fillRect(x, y, wide, tall >= 5 ? tall * 0.88 : tall);
      }
    }
  }

  // What lies at a point of the stage: {row, piece (-1: none), byte}, or null.
  at(x, y) {
    const { plot, view, side } = this;
    const byte = view.x0 + ((x - plot.left) / plot.width) * (view.x1 - view.x0);
    const number = Math.floor(view.r0 + (y / plot.height) * (view.r1 - view.r0));
    const row = side.rows[number];
    if (!row || x < 0 || y >= plot.height) return null;
    if (x < plot.left) return { row, piece: -1, byte: -1 };
    return byte < row.bytes ? { row, piece: side.pieceAt(row, byte), byte } : { row, piece: -1, byte: -1 };
  }

  listen() {
    const { stage } = this;
    const pointers = new Map();
    let moved = false;
    let start = null; // the view, and the distance of two fingers, when a drag began
    const place = (event) => {
      const box = stage.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    };
    const begin = () => {
      const [one, two] = [...pointers.values()];
      start = { view: { ...this.view }, one, two };
    };
    stage.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, place(event));
      moved = pointers.size > 1;
      begin();
    });
    stage.addEventListener("pointermove", (event) => {
      const here = place(event);
      if (!pointers.has(event.pointerId)) return this.point(here, event);
      pointers.set(event.pointerId, here);
      if (pointers.size === 1 && !moved) {
        moved = Math.hypot(here.x - start.one.x, here.y - start.one.y) > 4;
        if (moved) stage.setPointerCapture(event.pointerId);
      }
      if (moved) this.drag(start, [...pointers.values()]);
      return undefined;
    });
    const end = (event) => {
      const known = pointers.delete(event.pointerId);
      if (pointers.size) return begin();
      if (known && !moved && event.type === "pointerup") this.click(place(event), event);
      return undefined;
    };
    stage.addEventListener("pointerup", end);
    stage.addEventListener("pointercancel", end);
    stage.addEventListener("pointerleave", () => {
      this.shared.mark(null);
      tip.hide();
    });
    stage.addEventListener("dblclick", () => this.reset());
    stage.addEventListener("wheel", (event) => this.wheel(event, place(event)), { passive: false });
    stage.addEventListener("keydown", (event) => this.key(event));
  }

  drag(start, [one, two]) {
    const { x0, x1, r0, r1 } = start.view;
    const { plot } = this;
    if (two) {
      const before = Math.hypot(start.one.x - start.two.x, start.one.y - start.two.y);
      const factor = Math.hypot(one.x - two.x, one.y - two.y) / Math.max(before, 1);
      this.view = { ...start.view };
      const middle = ((start.one.x + start.two.x) / 2 - plot.left) / plot.width;
      return this.zoom(factor, middle, (start.one.y + start.two.y) / 2 / plot.height);
    }
    const bytes = ((start.one.x - one.x) / plot.width) * (x1 - x0);
    const rows = ((start.one.y - one.y) / plot.height) * (r1 - r0);
    tip.hide();
    return this.moveTo(x0 + bytes, x1 + bytes, r0 + rows, r1 + rows);
  }

  wheel(event, { x, y }) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const across = clamp((x - this.plot.left) / this.plot.width, 0, 1);
    this.zoom(Math.exp(-event.deltaY / 300), across, clamp(y / this.plot.height, 0, 1));
  }

  key(event) {
    const { x0, x1, r0, r1 } = this.view;
    const [bytes, rows] = [(x1 - x0) / 8, (r1 - r0) / 8];
    const acts = {
      ArrowLeft: () => this.moveTo(x0 - bytes, x1 - bytes, r0, r1),
      ArrowRight: () => this.moveTo(x0 + bytes, x1 + bytes, r0, r1),
      ArrowUp: () => this.moveTo(x0, x1, r0 - rows, r1 - rows),
      ArrowDown: () => this.moveTo(x0, x1, r0 + rows, r1 + rows),
      "+": () => this.zoom(2),
      "-": () => this.zoom(0.5),
      0: () => this.reset(),
    };
    if (!(event.key in acts) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    acts[event.key]();
  }

  point({ x, y }, event) {
    const found = this.at(x, y);
    if (!found || found.byte < 0) {
      this.shared.mark(null);
      tip.hide();
      return;
    }
    const { row, piece, byte } = found;
    this.shared.mark(piece < 0 ? null : this.side.tensors[row.layout.tensor[piece]]);
    tip.show(piece < 0 ? tellRest(this.side, row, byte) : tellPiece(this.side, row, piece), event);
  }

  click({ x, y }, event) {
    const found = this.at(x, y);
    if (!found) return;
    if (event.pointerType !== "mouse") this.point({ x, y }, event);
    this.onRow(this.side, found.row);
  }
}

const counting = (count, noun) => `${numberText(count)} ${noun}${count === 1 ? "" : "s"}`;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// 1, 2 or 5 times a power of ten.
function niceStep(atLeast) {
  const power = 10 ** Math.floor(Math.log10(Math.max(atLeast, 1)));
  return [1, 2, 5, 10].find((times) => times * power >= atLeast) * power;
}

// A place on the scale: as a size where that tells it from its neighbours, else to the byte.
function scaleText(byte, step) {
  const digits = byte ? Math.floor(Math.log10(byte)) - Math.floor(Math.log10(step)) + 1 : 1;
  return digits > 3 ? numberText(byte) : sizeText(byte);
}

function shortened(text, most) {
  if (text.length <= most) return text;
  const half = Math.max(Math.floor((most - 1) / 2), 1);
  return `${text.slice(0, half)}…${text.slice(-half)}`;
}

function heldText({ held, more, first, whole }) {
  if (more) return `the largest of ${numberText(more + 1)} neighbours drawn together`;
  const count = whole.length ? `of ${shapeText(whole)}` : "a scalar";
  return whole.length ? `${held} ${count}, from element ${numberText(first)}` : count;
}

function tellPiece(side, row, piece) {
  const told = side.told(row, piece);
  const range = `bytes ${numberText(told.at)} to ${numberText(told.stop)}`;
  return element(
    "div",
    {},
    element("b", { className: "name", textContent: told.fqn }),
    element("span", { textContent: `${told.kind}, ${told.dtype}, ${sizeText(told.nbytes)}` }),
    element("span", { textContent: heldText(told) }),
    element("span", { className: "name", textContent: told.file }),
    element("span", { textContent: `${range}; ${row.label}` }),
  );
}

function tellRest(side, row, byte) {
  const file = side.fileAt(row, byte);
  return element(
    "div",
    {},
    element("b", { textContent: "no tensor here" }),
    element("span", { textContent: "headers, padding, values, or bytes that are not read" }),
    element("span", { className: "name", textContent: file.name }),
    element("span", { textContent: `byte ${numberText(Math.floor(byte - file.start))}; ${row.label}` }),
  );
}

// What stands beside the pointer.
const tip = {
  place: null,
  show(content, event) {
    this.place ??= document.body.appendChild(element("div", { className: "tip" }));
    this.place.replaceChildren(content);
    this.place.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.place;
    const left = Math.min(event.clientX + 14, window.innerWidth - width - 8);
    const below = event.clientY + 16 + height < window.innerHeight;
    this.place.style.left = `${Math.max(left, 8)}px`;
    this.place.style.top = `${below ? event.clientY + 16 : Math.max(event.clientY - height - 12, 8)}px`;
  },
  hide() {
    if (this.place) this.place.hidden = true;
  },
};

// The pieces of a row, as a table.
function rowTable(place, side, row) {
  const told = row.layout.tensor.map((_, piece) => side.told(row, piece));
  const column = (title, type, value) => ({ title, type, values: told.map(value) });
  const title = `${side.title}: ${row.label}`;
  const close = element("button", { type: "button", textContent: "Close" });
  close.addEventListener("click", () => place.replaceChildren());
  place.replaceChildren(
    element(
      "div",
      { className: "map-head" },
      element("h3", {}, title, " ", element("span", { className: "count", textContent: `${told.length} pieces, ${sizeText(row.bytes)}` })),
      close,
    ),
  );
  new DataTable(
    place,
    [
      column("Tensor", "name", (piece) => (piece.more ? `${piece.fqn} and ${piece.more} more` : piece.fqn)),
      column("Kind", "text", (piece) => piece.kind),
      column("Dtype", "text", (piece) => piece.dtype),
      column("Piece", "name", (piece) => (piece.more ? "" : piece.held)),
      column("Of", "name", (piece) => shapeText(piece.whole)),
      column("From element", "number", (piece) => piece.first),
      column("Size", "bytes", (piece) => piece.nbytes),
      column("At byte", "number", (piece) => piece.at),
      column("File", "name", (piece) => piece.file),
    ],
    title,
  );
}

// A button that lets some tensors stand out alone.
function chip(shared, parts, only) {
  const made = element("button", { type: "button", className: "chip", title: "Show alone" }, ...parts);
  made.setAttribute("aria-pressed", "false");
  made.addEventListener("click", () => {
    const again = shared.chosen === made;
    shared.chosen?.setAttribute("aria-pressed", "false");
    shared.chosen = again ? null : made;
    shared.only = again ? null : only;
    made.setAttribute("aria-pressed", String(!again));
    shared.draw();
  });
  return made;
}

function swatch(pick) {
  const made = element("i");
  painters.push(() => {
    made.style.background = pick();
  });
  return made;
}

function legend(sides, shared, { singled, singled_as: called }) {
  const kinds = [...new Set(sides.flatMap((side) => [...side.kinds.keys()]))];
  const order = (kind) => KINDS.indexOf(kind) + 1 || KINDS.length + 1;
  kinds.sort((a, b) => order(a) - order(b));
  const chips = kinds.map((kind) => {
    const sizes = [...new Set(sides.map((side) => sizeText(side.kinds.get(kind) ?? 0)))];
    const parts = [swatch(() => colourOfKind(kind)), kind, element("small", {}, sizes.join(" → "))];
    return chip(shared, parts, (tensor) => tensor[1] === kind);
  });
  if (singled.length) {
    const keys = new Set(singled.map(([kind, fqn]) => `${kind} ${fqn}`));
    const one = ([fqn, kind]) =>
      keys.has(`${kind} ${fqn}`) || (WEIGHTS.includes(kind) && keys.has(`weight ${fqn}`));
    chips.push(chip(shared, [called, element("small", {}, numberText(singled.length))], one));
  }
  const rest = element("span", { className: "chip" }, swatch(() => colour("rest")), "no tensor");
  return [...chips, rest];
}

function drawMaps(place, data) {
  const sides = data.sides.map((side) => new Side(side));
  const shared = new Shared();
  const find = element("input", { type: "search", placeholder: "Find a tensor" });
  find.setAttribute("aria-label", "Find a tensor on the maps");
  find.addEventListener("input", () => {
    shared.words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    shared.draw();
  });
  const scale = element("input", { type: "checkbox" });
  scale.addEventListener("change", () => {
    shared.sameScale = scale.checked;
    for (const map of shared.maps) map.reset();
  });
  const tools = element("div", { className: "tools" }, find);
  if (sides.length > 1) tools.append(element("label", {}, scale, " same scale"));
  const list = element("div", { className: "row-list" });
  place.append(tools, element("div", { className: "legend" }, ...legend(sides, shared, data)));
  for (const side of sides) {
    new ShardMap(place, side, shared, (of, row) => rowTable(list, of, row));
  }
  place.append(list);
}
