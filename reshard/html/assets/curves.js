// Several runs over each other, and below them how far each is from the baseline, if there is one.

const CURVE_HEIGHT = 260;
const APART_HEIGHT = 150;

// Values of a run at the steps of all runs. Undefined: another run's step, a line goes through;
// null: a value that is no number, where the line breaks.
function aligned(run, key, steps) {
  const values = new Map(run.steps.map((step, index) => [step, run[key]?.[index]]));
  return steps.map((step) => values.get(step));
}

function apartFrom(base, values) {
  return values.map((value, index) => {
    if (value === undefined || base[index] === undefined) return undefined;
    return value === null || base[index] === null ? null : value - base[index];
  });
}

// Room around what is drawn; a difference of nothing stands in the middle.
function range(_plot, low, high) {
  if (low === null || high === null) return [-1, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

function differenceText(value) {
  if (value === 0) return "0";
  return Math.abs(value) < 1e-3 ? value.toExponential(1) : numberText(value);
}

const STEP_GAPS = [1, 2, 5].flatMap((times) => Array.from({ length: 10 }, (_, power) => times * 10 ** power)).sort((a, b) => a - b);
const stepText = (tick) => (Number.isInteger(tick) ? numberText(tick) : "");

function plotOptions(title, series, { width, height, format, sync }) {
  const axis = {
    stroke: colour("faint"),
    grid: { stroke: colour("grid"), width: 1 },
    ticks: { stroke: colour("line"), width: 1, size: 4 },
    font: `11px ${colour("mono")}`,
  };
  const value = (_plot, number) => (number === null || number === undefined ? "–" : format(number));
  return {
    title,
    width,
    height,
    scales: { x: { time: false }, y: { range } },
    cursor: { sync: { key: sync }, points: { size: 6 } },
    legend: { live: true },
    series: [{ label: "step" }, ...series.map((each) => ({ ...each, value }))],
    axes: [
      { ...axis, size: 32, incrs: STEP_GAPS, values: (_plot, ticks) => ticks.map(stepText) },
      { ...axis, size: 70, values: (_plot, ticks) => ticks.map(format) },
    ],
  };
}

class CurvePair {
  constructor(place, data, [key, label]) {
    this.data = data;
    this.key = key;
    this.label = label;
    this.place = place.appendChild(element("div", { className: "plots" }));
    this.steps = [...new Set(data.runs.flatMap((run) => run.steps))].sort((a, b) => a - b);
    this.values = data.runs.map((run) => aligned(run, key, this.steps));
    this.plots = [];
    painters.push(() => this.draw());
    new ResizeObserver(perFrame(() => this.resize())).observe(this.place);
  }

  // The baseline is broad and pale, the others thin upon it, all but one of them dashed: where they
  // are one, each is seen. Without a baseline, runs of one colour differ in their dashes.
  line(number) {
    if (this.data.baseline === null) {
      const again = Math.floor(number / 5);
      return {
        label: this.data.runs[number].name,
        stroke: colour(`curve-${(number % 5) + 1}`),
        width: 1.75,
        dash: again ? [10 / again, 4] : undefined,
        points: { show: this.steps.length < 30 },
      };
    }
    const isBase = number === this.data.baseline;
    const firstOther = this.data.baseline === 0 ? 1 : 0;
    return {
      label: this.data.runs[number].name,
      stroke: colour(isBase ? "baseline" : `curve-${(number % 5) + 1}`),
      width: isBase ? 5 : 1.75,
      dash: isBase || number === firstOther ? undefined : [3 + 3 * number, 4],
      points: { show: this.steps.length < 2 },
    };
  }

  draw() {
    for (const plot of this.plots) plot.destroy();
    this.place.replaceChildren();
    const width = this.place.clientWidth;
    const { baseline } = this.data;
    const numbers = this.data.runs.map((_, number) => number);
    const others = numbers.filter((number) => number !== baseline);
    const drawn = baseline === null ? others : [baseline, ...others];
    const sync = `curves-${this.key}`;
    const format = baseline === null ? differenceText : (value) => numberText(value);
    const above = plotOptions(this.label, drawn.map((number) => this.line(number)), {
      ...{ width, height: CURVE_HEIGHT, format, sync },
    });
    const main = new uPlot(above, [this.steps, ...drawn.map((number) => this.values[number])], this.place);
    this.plots = [main];
    if (baseline === null || !others.length) return;
    const apart = others.map((number) => apartFrom(this.values[baseline], this.values[number]));
    const isNothing = apart.every((values) => values.every((value) => !value));
    const zeroText = (value) => (value === 0 ? "0" : ""); // a scale of nothing has no other place
    const title = `Difference from ${this.data.runs[baseline].name}`;
    const below = plotOptions(title, others.map((number) => this.line(number)), {
      ...{ width, height: APART_HEIGHT, format: isNothing ? zeroText : differenceText, sync },
    });
    this.plots.push(new uPlot(below, [this.steps, ...apart], this.place));
  }

  resize() {
    const width = this.place.clientWidth;
    for (const plot of this.plots) {
      if (plot.width !== width) plot.setSize({ width, height: plot.height });
    }
  }
}

function drawCurves(place, data) {
  for (const measure of data.measures) new CurvePair(place, data, measure);
}
