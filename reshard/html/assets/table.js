// A table of thousands of rows: sorted, filtered, and only the rows in sight are made.

const ROW_HEIGHT = 28; // pixels, as in the style sheet
const PRINTED_ROWS = 300;
const MOST_CHOICES = 12; // of a column that gets a menu
const LONGEST_CHOICE = 28; // letters
const LONGEST_CELL = 64; // letters

class DataTable {
  constructor(place, columns, label) {
    this.columns = columns;
    this.rowCount = columns.length ? columns[0].values.length : 0;
    this.order = Array.from({ length: this.rowCount }, (_, row) => row);
    this.shown = this.order;
    this.sorted = null; // {column, descending}
    this.words = [];
    this.choices = new Map(); // column number -> the chosen value
    this.texts = columns.map((column) =>
      column.values.map((value) => cellText(value, column.type)),
    );
    this.build(place, label);
    this.update();
  }

  build(place, label) {
    this.note = element("span", { className: "note" });
    this.note.setAttribute("aria-live", "polite");
    const tools = element("div", { className: "tools" });
    if (this.rowCount > 8) tools.append(this.search(label), ...this.menus(), this.note);
    this.head = element("tr", {}, ...this.columns.map((column, number) => this.header(number)));
    this.body = element("tbody");
    const widths = this.columns.map((_, number) => {
      const width = element("col");
      width.style.width = `${this.letters(number)}ch`;
      return width;
    });
    const total = this.columns.reduce((sum, _, number) => sum + this.letters(number), 0);
    const table = element(
      "table",
      {},
      element("colgroup", {}, ...widths),
      element("thead", {}, this.head),
      this.body,
    );
    table.style.minWidth = `${total}ch`;
    table.setAttribute("aria-rowcount", this.rowCount);
    this.scroller = element("div", { className: "scroller", tabIndex: 0 }, table);
    this.scroller.setAttribute("role", "region");
    this.scroller.setAttribute("aria-label", label);
    const draw = perFrame(() => this.draw());
    this.scroller.addEventListener("scroll", draw, { passive: true });
    window.addEventListener("resize", draw);
    window.addEventListener("beforeprint", () => this.drawRows(0, PRINTED_ROWS, true));
    window.addEventListener("afterprint", () => this.draw());
    place.append(tools, this.scroller);
  }

  search(label) {
    const field = element("input", { type: "search", placeholder: "Filter" });
    field.setAttribute("aria-label", `Filter ${label}`);
    field.addEventListener("input", () => {
      this.words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      this.update();
    });
    return field;
  }

  // A menu for each column of few words.
  menus() {
    const made = [];
    this.columns.forEach((column, number) => {
      if (column.type !== "text" && column.type !== "state") return;
      const values = [...new Set(this.texts[number])].sort();
      const isWord = values.every((value) => value.length <= LONGEST_CHOICE);
      if (values.length < 2 || values.length > MOST_CHOICES || !isWord) return;
      const menu = element(
        "select",
        {},
        element("option", { value: "", textContent: `${column.title}: all` }),
        ...values.map((value) => element("option", { value: `=${value}`, textContent: value })),
      );
      menu.setAttribute("aria-label", column.title);
      menu.addEventListener("change", () => {
        if (menu.value) this.choices.set(number, menu.value.slice(1));
        else this.choices.delete(number);
        this.update();
      });
      made.push(menu);
    });
    return made;
  }

  header(number) {
    const button = element("button", { type: "button", textContent: this.columns[number].title });
    button.addEventListener("click", () => {
      const again = this.sorted?.column === number;
      const descending = again ? !this.sorted.descending : isNumeric(this.columns[number]);
      this.sorted = { column: number, descending };
      this.update();
    });
    const cell = element("th", { scope: "col" }, button);
    if (isNumeric(this.columns[number])) cell.className = "right";
    return cell;
  }

  // How wide a column is: as its longest text, within reason.
  letters(number) {
    let most = this.columns[number].title.length + 2;
    for (const text of this.texts[number]) if (text.length > most) most = text.length;
    return Math.min(most, LONGEST_CELL) + 3;
  }

  update() {
    this.shown = this.order.filter((row) => this.matches(row));
    if (this.sorted) {
      const values = this.columns[this.sorted.column].values;
      const sign = this.sorted.descending ? -1 : 1;
      this.shown.sort((a, b) => sign * compared(values[a], values[b]) || a - b);
    }
    [...this.head.children].forEach((cell, number) => {
      const here = this.sorted?.column === number;
      const way = this.sorted?.descending ? "descending" : "ascending";
      cell.setAttribute("aria-sort", here ? way : "none");
    });
    const all = numberText(this.rowCount);
    const some = numberText(this.shown.length);
    this.note.textContent = this.shown.length < this.rowCount ? `${some} of ${all}` : "";
    this.scroller.scrollTop = 0;
    this.draw();
  }

  matches(row) {
    for (const [number, value] of this.choices) {
      if (this.texts[number][row] !== value) return false;
    }
    return this.words.every((word) =>
      this.texts.some((texts) => texts[row].toLowerCase().includes(word)),
    );
  }

  draw() {
    const first = Math.max(Math.floor(this.scroller.scrollTop / ROW_HEIGHT) - 8, 0);
    const count = Math.ceil((this.scroller.clientHeight || 480) / ROW_HEIGHT) + 16;
    this.drawRows(first, first + count, false);
  }

  drawRows(first, stop, printed) {
    const rows = this.shown.slice(first, stop).map((row, index) => this.row(row, first + index));
    const left = this.shown.length - first - rows.length;
    const below = printed ? this.left(left) : [this.space(left)];
    this.body.replaceChildren(this.space(first), ...rows, ...below);
  }

  row(row, index) {
    const cells = this.columns.map((column, number) => {
      const text = this.texts[number][row];
      const cell = element("td", { className: cellClass(column, text) });
      if (text.length > LONGEST_CELL) cell.title = text;
      cell.append(column.type === "state" ? element("span", { textContent: text }) : text);
      return cell;
    });
    const made = element("tr", {}, ...cells);
    made.setAttribute("aria-rowindex", index + 2);
    return made;
  }

  // Rows out of sight, as room.
  space(rows) {
    const room = element("tr", { className: "space" });
    room.setAttribute("aria-hidden", "true");
    room.style.height = `${rows * ROW_HEIGHT}px`;
    return room;
  }

  // On paper: what is not printed is said.
  left(rows) {
    if (!rows) return [];
    const cell = element("td", { textContent: `${numberText(rows)} more rows in the file` });
    cell.colSpan = this.columns.length;
    return [element("tr", {}, cell)];
  }
}

function isNumeric(column) {
  return column.type === "number" || column.type === "bytes";
}

function cellText(value, type) {
  if (value === null) return "";
  if (typeof value !== "number") return String(value);
  return type === "bytes" ? sizeText(value) : numberText(value);
}

const GOOD_STATES = new Set(["passed", "equal", "yes"]);
const BAD_STATES = new Set(["failed", "different", "no"]);

function cellClass(column, text) {
  if (column.type === "state") {
    const tone = GOOD_STATES.has(text) ? "good" : BAD_STATES.has(text) ? "bad" : "plain";
    return `state ${tone}`;
  }
  return isNumeric(column) ? "right" : column.type;
}

const BY_NAME = new Intl.Collator("en", { numeric: true });

// Numbers before words (nan, inf), nothing last.
function compared(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return BY_NAME.compare(a, b);
}
