// Curves, drawn from the points of `data-series`: with the value under the pointer, a logarithmic axis and smoothing.
const DASHES = ['', '7 4', '2 4', '9 3 2 3'];
const rounded = value => String(Math.round(value * 10) / 10);
const extent = values => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
// A range a little wider than the values.
const padded = values => {
  const [low, high] = extent(values);
  if (low > high) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const space = Math.max(0.05 * (high - low), 1e-6 * Math.max(Math.abs(low), Math.abs(high)));
  // An axis of fractions or norms begins at 0.
  return [low >= 0 && low - space < 0 ? 0 : low - space, high + space];
};
// Round values in a range, at most about `most`.
const ticks = ([low, high], most, least = 0) => {
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max([1, 2, 5, 10].map(m => m * power).find(s => s >= raw * (1 - 1e-9)), least);
  if (!Number.isFinite(step) || step <= 0) return [low];
  const first = Math.ceil(low / step - 1e-9), found = [];
  for (let i = 0; i <= most + 1 && (first + i) * step <= high + 1e-9 * step; i++) found.push((first + i) * step);
  return found;
};
const logTicks = ([low, high]) => {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const every = Math.ceil((to - from) / 6), found = [];
  for (let p = from; p <= to; p += every) for (const m of to - from <= 2 ? [1, 2, 5] : [1]) found.push(m * 10 ** p);
  const inside = found.filter(v => v >= low * (1 - 1e-9) && v <= high * (1 + 1e-9));
  return inside.length > 1 ? inside : ticks([low, high], 5).filter(v => v > 0);
};
// A value with the digits that distinguish it from its neighbours on the axis.
const label = (value, step, largest) => {
  if (Math.abs(value) < 1e-9 * largest) return '0';
  const digits = range => Math.min(12, Math.max(0, Math.ceil(-Math.log10(range) - 1e-9)));
  return largest >= 1e-3 && largest < 1e6 ? value.toFixed(digits(step)) : value.toExponential(digits(step / largest));
};
const exact = value => {
  const size = Math.abs(value);
  return size === 0 || (size >= 1e-3 && size < 1e5) ? String(+value.toPrecision(5)) : value.toExponential(3);
};
// Means over a window of `width` points that ends at each point; none before the window is full.
const running = (points, width) => {
  let sum = 0;
  const means = points.map(([x, y], i) => {
    sum += y - (i >= width ? points[i - width][1] : 0);
    return [x, sum / Math.min(width, i + 1)];
  });
  return means.slice(width - 1);
};
const counted = steps => steps === 1 ? '1 step' : `${steps} steps`;
const plots = new Map();
const curves = plot => {
  const { smooth } = plots.get(plot);
  return JSON.parse(plot.dataset.series).map(series => {
    const flat = series.points, points = [];
    for (let i = 0; i < flat.length; i += 2) points.push([flat[i], flat[i + 1]]);
    if (!series.mean) return { ...series, points };
    const width = Math.min(smooth ?? series.mean, Math.max(1, Math.floor(points.length / 2)));
    return { ...series, width, points: running(points, width) };
  });
};
const draw = plot => {
  const state = plots.get(plot), width = Math.round(plot.clientWidth);
  if (width < 40) return;
  const series = state.series = curves(plot), all = series.flatMap(s => s.points);
  const positive = all.length > 0 && all.every(([, y]) => y > 0), log = state.log && positive;
  state.logButton.disabled = !positive;
  state.logButton.title = positive ? '' : 'The curves have values that are not positive.';
  const height = Math.round(Math.min(300, Math.max(190, width * 0.5)));
  const scale = log ? Math.log10 : v => v;
  const xRange = padded(all.map(p => p[0])), yRange = padded(all.map(p => scale(p[1])));
  const whole = all.every(([x]) => Number.isInteger(x));
  const xTicks = ticks(xRange, Math.max(2, Math.floor(width / 80)), whole ? 1 : 0);
  const yTicks = log ? logTicks(yRange.map(v => 10 ** v)) : ticks(yRange, 5);
  const labels = (values, log) => values.map(v => log ? exact(v)
    : label(v, values.length > 1 ? values[1] - values[0] : Math.abs(v) || 1, Math.max(...values.map(Math.abs))));
  const yLabels = labels(yTicks, log), xLabels = labels(xTicks, false);
  const left = 14 + 7.5 * Math.max(1, ...yLabels.map(text => text.length)), right = width - 14, top = 8, bottom = height - 40;
  const place = (range, from, to) => v => from + (v - range[0]) / (range[1] - range[0]) * (to - from);
  const toX = place(xRange, left, right), toY = (f => v => f(scale(v)))(place(yRange, bottom, top));
  state.places = { toX, top, bottom };
  const parts = [];
  yTicks.forEach((v, i) => {
    const y = rounded(toY(v));
    parts.push(`<path class="grid" d="M${rounded(left)} ${y}H${rounded(right)}"/><text x="${rounded(left - 6)}" y="${y}" dy=".35em" text-anchor="end">${yLabels[i]}</text>`);
  });
  xTicks.forEach((v, i) => {
    const x = rounded(toX(v));
    parts.push(`<path class="grid" d="M${x} ${top}V${bottom}"/><text x="${x}" y="${bottom + 17}" text-anchor="middle">${xLabels[i]}</text>`);
  });
  parts.push(`<path class="axis" d="M${rounded(left)} ${top}V${bottom}H${rounded(right)}"/><text x="${rounded((left + right) / 2)}" y="${height - 5}" text-anchor="middle">step</text>`);
  // Dots below lines.
  for (const s of [...series].sort((a, b) => a.line - b.line)) {
    const at = s.points.map(([x, y]) => [rounded(toX(x)), rounded(toY(y))]);
    const marks = s.line ? (at.length <= 12 ? 3 : 0) : 2;
    if (s.line) parts.push(`<polyline stroke="${s.colour}" stroke-dasharray="${DASHES[s.dash % DASHES.length]}" points="${at.join(' ')}"/>`);
    if (marks) at.forEach(([x, y]) => parts.push(`<circle cx="${x}" cy="${y}" r="${marks}" fill="${s.colour}" opacity="${s.line ? 1 : .45}"/>`));
  }
  parts.push('<path class="pointer"/>');
  state.drawing.innerHTML = `<svg role="img" viewBox="0 0 ${width} ${height}">${parts.join('')}</svg>`;
  const ends = series.filter(s => s.line && s.points.length).map(s =>
    `${s.name} from ${exact(s.points[0][1])} to ${exact(s.points.at(-1)[1])}`);
  state.drawing.firstChild.setAttribute('aria-label', `${plot.parentNode.getAttribute('aria-label')}: ${ends.join('; ')}`);
  state.shown.textContent = state.range ? `mean of ${counted(Math.max(1, ...series.map(s => s.width ?? 1)))}` : '';
  state.tip.hidden = true;
};
// Step and value of each curve, at the steps that are nearest to the pointer.
const point = (plot, event) => {
  const { series, places, drawing, tip } = plots.get(plot);
  const svg = drawing.firstChild;
  if (!svg || !series.some(s => s.points.length)) return;
  const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
  const nearest = points => points.reduce((best, p) =>
    Math.abs(places.toX(p[0]) - at) < Math.abs(places.toX(best[0]) - at) ? p : best);
  const found = series.filter(s => s.points.length).map(s => ({ ...s, near: nearest(s.points) }));
  const step = nearest(found.map(s => s.near))[0], x = places.toX(step);
  svg.querySelector('.pointer').setAttribute('d', `M${rounded(x)} ${places.top}V${places.bottom}`);
  tip.replaceChildren(...[`step ${step}`, ...found].map(part => {
    const line = document.createElement('div');
    if (typeof part === 'string') { line.textContent = part; return line; }
    const swatch = document.createElement('span');
    swatch.className = 'swatch';
    swatch.style.background = part.colour;
    const other = part.near[0] === step ? '' : ` (step ${part.near[0]})`;
    line.append(swatch, `${part.name} ${exact(part.near[1])}${other}`);
    return line;
  }));
  tip.hidden = false;
  const beside = x < svg.viewBox.baseVal.width / 2;
  tip.style.left = beside ? `${x + 10}px` : '';
  tip.style.right = beside ? '' : `${plot.clientWidth - x + 10}px`;
};
const part = (name, attributes) => Object.assign(document.createElement(name), attributes);
const resized = new ResizeObserver(entries => entries.forEach(({ target }) => {
  const state = plots.get(target);
  if (state.width === target.clientWidth) return;
  state.width = target.clientWidth;
  draw(target);
}));
const addPlot = plot => {
  const tools = part('div', { className: 'tools' }), drawing = part('div', { className: 'drawing' });
  const tip = part('div', { className: 'tip', hidden: true }), shown = part('span', {});
  const logButton = part('button', { type: 'button', textContent: 'log', ariaPressed: 'false' });
  const state = { log: false, smooth: null, tools, drawing, tip, shown, logButton, range: null };
  const mean = JSON.parse(plot.dataset.series).find(s => s.mean)?.mean;
  if (mean) {
    state.range = part('input', { type: 'range', min: 0, max: 9, step: 1, value: Math.log2(mean), ariaLabel: 'smoothing, in steps' });
    state.range.addEventListener('input', () => { state.smooth = 2 ** state.range.value; draw(plot); });
    tools.append(shown, state.range);
  }
  logButton.addEventListener('click', () => {
    state.log = !state.log;
    logButton.ariaPressed = String(state.log);
    draw(plot);
  });
  tools.append(logButton);
  plot.replaceChildren(tools, drawing, tip);
  plots.set(plot, state);
  for (const kind of ['pointermove', 'pointerdown']) drawing.addEventListener(kind, event => point(plot, event));
  drawing.addEventListener('pointerleave', () => {
    tip.hidden = true;
    drawing.querySelector('.pointer')?.removeAttribute('d');
  });
  draw(plot);
  resized.observe(plot);
};
// Draws plots that are new on the page, and forgets those that are gone.
const addPlots = () => {
  for (const plot of plots.keys()) if (!plot.isConnected) { resized.unobserve(plot); plots.delete(plot); }
  document.querySelectorAll('.plot').forEach(plot => plots.has(plot) || addPlot(plot));
};
addPlots();
